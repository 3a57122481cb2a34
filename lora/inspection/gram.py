"""Gram matrices of factors that are read from a file into memory that is used again.

||U D||^2 is the sum over (U^T U) * (D D^T), r x r matrices that add up over blocks of rows of U and of columns of D.
So neither the product nor a whole factor has to be in memory. Fresh memory for each block would cost about as much as
reading it: the system clears it page by page.

Most layers are small: both factors are read, converted and multiplied as a :class:`Pair`, in as few calls as there can
be. For after each product the code has left the caches, and threads wait for each other at each call of torch or of
the system. So the views of a pair are made once for all layers of its shape, too.
"""

from __future__ import annotations

import math
import threading

import torch

#: Numbers of the factors of a layer up to which these are a pair; bytes of a larger factor that are read at a time, and
#: numbers of it that are multiplied at a time.
PAIR, BLOCK, NUMBERS = 1 << 21, 1 << 20, 1 << 19

#: Shapes that are remembered. Files have a dozen.
_SHAPES = 256


class Pair:
    """Memory for down [rank, in] and up [out, rank]: ``raw``, their bytes, to be read into one behind the other.

    ``parts``: how many blocks of rows up consists of. Products are formed in float32, those of float64 in float64.
    """

    def __init__(self, space: Workspace, down: tuple[int, int], up: tuple[int, int], parts: int, dtype: torch.dtype):
        (rank, inp), out = down, up[0]
        self.raw, self._stored = space.stored((rank * (inp + out),), dtype)
        work = torch.float64 if dtype == torch.float64 else torch.float32
        memory = space.numbers(2 * rank * rank + len(self._stored), work)
        self._inner, self._outer, free = memory.split((rank * rank, rank * rank, len(self._stored)))
        self._numbers = self._stored if dtype == work else free
        first, second = self._numbers[:rank * inp].view(down), self._numbers[rank * inp:].view(up)
        self._down = first, first.T, self._inner.view(rank, rank)
        blocks = [second[part * out // parts:(part + 1) * out // parts] for part in range(parts)]
        self._up = [(rows.T, rows, self._outer.view(rank, rank)) for rows in blocks]

    def energies(self) -> list[float]:
        """Square of the norm of the product with down of each part of up, for what has been read."""
        if self._numbers is not self._stored:
            self._numbers.copy_(self._stored)
        _multiply(*self._down)
        return [self._energy(*factors) for factors in self._up]

    def _energy(self, *factors: torch.Tensor) -> float:
        _multiply(*factors)
        return inner_product(self._outer, self._inner)


def _multiply(first: torch.Tensor, second: torch.Tensor, product: torch.Tensor) -> None:
    torch.mm(first, second, out=product)


def inner_product(outer: torch.Tensor, inner: torch.Tensor) -> float:
    """The sum of ``outer`` * ``inner`` in float64; ``outer`` is overwritten."""
    return outer.mul_(inner).sum(dtype=torch.float64).item()


class Workspace(threading.local):
    """Memory that a thread reads and computes in. All share it: what was handed out last is all that holds anything."""

    def __init__(self):
        self._bytes, self._numbers = bytearray(BLOCK), {}
        self._pairs: dict[tuple, Pair] = {}

    def pair(self, *shape) -> Pair:
        """The :class:`Pair` of these arguments."""
        found = self._pairs.get(shape)
        if found is None:
            if len(self._pairs) >= _SHAPES:
                self._pairs.clear()
            found = Pair(self, *shape)
            self._pairs[shape] = found
        return found

    def stored(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[memoryview, torch.Tensor]:
        """Bytes to be read into, and the tensor that they are; no extent is 0."""
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._bytes):
            self._pairs.clear()
            self._bytes = bytearray(size)
        return memoryview(self._bytes)[:size], torch.frombuffer(self._bytes, dtype=dtype,
                                                                count=math.prod(shape)).view(shape)

    def numbers(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """``count`` uninitialized numbers."""
        kept = self._numbers.get(dtype)
        if kept is None or len(kept) < count:
            self._pairs.clear()
            kept = self._numbers[dtype] = torch.empty(max(NUMBERS, count), dtype=dtype)
        return kept[:count]


def add_gram(total: torch.Tensor, factor: torch.Tensor, space: Workspace) -> None:
    """Add B^T B to ``total`` [rank, rank] for ``factor`` B [n, rank], of any dtype, in pieces of its rows."""
    for piece in factor.split(max(1, NUMBERS // factor.shape[1])):
        working = piece if piece.dtype == total.dtype else _converted(piece, space.numbers(piece.numel(), total.dtype))
        total.addmm_(working.T, working)


def _converted(piece: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """``piece`` in ``memory``, laid out as it is: columns of D stay as far apart as they are read."""
    if piece.stride(0) == 1 and piece.shape[1] > 1:
        return memory.view(piece.T.shape).copy_(piece.T).T
    return memory.view(piece.shape).copy_(piece)
