"""Gram matrices of factors that are read block by block, in memory that is used again.

||U D||^2 is the sum over (U^T U) * (D D^T), r x r matrices that add up over blocks of rows of U and of columns of D.
So neither the product nor a whole factor has to be in memory. Fresh memory for each block would cost about as much as
reading it: the system clears it page by page.
"""

from __future__ import annotations

import threading

import torch

#: Bytes of a factor that are read at a time, and numbers that are multiplied at a time: both stay in a core's cache.
BLOCK, NUMBERS = 1 << 20, 1 << 18


class Workspace(threading.local):
    """Memory that a thread reads and computes in; what was handed out is void when the same is asked for again."""

    def __init__(self):
        self._bytes = torch.empty(BLOCK, dtype=torch.uint8)
        self._numbers: dict[torch.dtype, torch.Tensor] = {}

    def raw(self, size: int) -> torch.Tensor:
        """``size`` bytes, as uint8."""
        if size > len(self._bytes):
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size]

    def matrix(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized [rows, columns]."""
        kept = self._numbers.get(dtype)
        if kept is None or kept.numel() < rows * columns:
            kept = self._numbers[dtype] = torch.empty(max(NUMBERS, rows * columns), dtype=dtype)
        return kept[:rows * columns].view(rows, columns)


class Gram:
    """The sum of B^T B over blocks B [n, rank]. Products are formed in ``dtype`` and added up in float64."""

    def __init__(self, rank: int, dtype: torch.dtype, space: Workspace):
        self.total = torch.zeros(rank, rank, dtype=torch.float64)
        self._dtype, self._space, self._step = dtype, space, max(1, NUMBERS // max(1, rank))

    def add(self, block: torch.Tensor) -> None:
        """Add B^T B of ``block``, of any dtype; a float64 one is multiplied in float64."""
        for piece in block.split(self._step):
            working = piece if piece.dtype in (self._dtype, torch.float64) else self._converted(piece)
            self.total += working.T @ working

    def _converted(self, piece: torch.Tensor) -> torch.Tensor:
        """``piece`` in the working dtype, laid out as it is: columns of D stay as far apart as they are read."""
        if piece.stride(0) == 1 and piece.shape[1] > 1:
            return self._space.matrix(*piece.T.shape, self._dtype).copy_(piece.T).T
        return self._space.matrix(*piece.shape, self._dtype).copy_(piece)

    def energy(self, other: Gram) -> float:
        """||U D||^2, where this is the Gram matrix of U and ``other`` that of D^T."""
        return (self.total * other.total).sum().item()
