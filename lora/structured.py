"""Changes of full or high rank that are known by small factors: Kronecker and Hadamard products.

Neither is ever built as a whole; rows of it are, on demand, in float32.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch

from .terms import Term

#: A factor of a Kronecker product: a matrix, or a pair (A, B) that multiplies to it.
Factor = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"


class Structured(abc.ABC):
    """``scale`` times an [out, in] matrix."""

    scale: float

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int]:
        """(out, in)."""

    @property
    @abc.abstractmethod
    def exact_rank(self) -> int:
        """Rank of the smallest exact pair of factors that the algebra gives."""

    @abc.abstractmethod
    def terms(self) -> tuple[Term, ...]:
        """The exact pair, ``exact_rank`` wide, float32 or float64."""

    @abc.abstractmethod
    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) as a dense [stop - start, in] matrix, float32 or float64, scale included."""


def working(tensor: torch.Tensor) -> torch.Tensor:
    """float32 for what is stored in 16 bits, so that products of stored values stay exact; float64 as it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@dataclass(frozen=True, eq=False)
class Kronecker(Structured):
    """``scale * kron(W1, W2)`` with W1 [a, b] the outer and W2 [c, d] the inner factor: out = a c, in = b d.

    Each is a matrix or a pair (A, B) that multiplies to it. With W1 = A1 B1 and W2 = A2 B2,
    kron(W1, W2) = kron(A1, A2) kron(B1, B2), of rank r1 r2; a matrix counts as I W or W I, whichever
    is narrower. (The mixed-product property; LyCORIS, "Navigating Text-To-Image Customization".)
    """

    w1: Factor
    w2: Factor
    scale: float = 1.0

    @property
    def shape(self):
        (a, b), (c, d) = _extent(self.w1), _extent(self.w2)
        return a * c, b * d

    @property
    def exact_rank(self):
        return _inner(self.w1) * _inner(self.w2)

    def terms(self):
        (a1, b1), (a2, b2) = _pair(self.w1), _pair(self.w2)
        return (Term(torch.kron(a1, a2), torch.kron(b1, b2), self.scale),)

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """W1 and W2 themselves; both are small."""
        return _matrix(self.w1), _matrix(self.w2)

    def rows(self, start, stop):
        w1, w2 = self.matrices()
        c = w2.shape[0]
        first, last = start // c, -(-stop // c)
        block = torch.kron(w1[first:last], w2)
        return self.scale * block[start - first * c:stop - first * c]


def _extent(factor):
    if isinstance(factor, tuple):
        return factor[0].shape[0], factor[1].shape[1]
    return tuple(factor.shape)


def _inner(factor):
    rows, columns = _extent(factor)
    rank = factor[0].shape[1] if isinstance(factor, tuple) else min(rows, columns)
    return min(rank, rows, columns)


def _matrix(factor):
    if isinstance(factor, tuple):
        return working(factor[0]) @ working(factor[1])
    return working(factor)


def _pair(factor):
    """(A, B) with A B = factor, the inner extent as small as :func:`_inner` says."""
    rows, columns = _extent(factor)
    if isinstance(factor, tuple) and factor[0].shape[1] <= min(rows, columns):
        return working(factor[0]), working(factor[1])
    matrix = _matrix(factor)
    identity = torch.eye(min(rows, columns), dtype=matrix.dtype, device=matrix.device)
    return (identity, matrix) if rows <= columns else (matrix, identity)


@dataclass(frozen=True, eq=False)
class Hadamard(Structured):
    """``scale * (A1 B1) * (A2 B2)``, elementwise product; A1 [out, r1], B1 [r1, in], A2 [out, r2], B2 [r2, in].

    Exact factors of rank r1 r2: column (i, j) of ``up`` is A1[:, i] * A2[:, j], row (i, j) of ``down`` is
    B1[i] * B2[j]. (Khatri-Rao products; FedPara, "Low-rank Hadamard Product".)
    """

    a1: torch.Tensor
    b1: torch.Tensor
    a2: torch.Tensor
    b2: torch.Tensor
    scale: float = 1.0

    @property
    def shape(self):
        return self.a1.shape[0], self.b1.shape[1]

    @property
    def exact_rank(self):
        return self.b1.shape[0] * self.b2.shape[0]

    def terms(self):
        up = working(self.a1)[:, :, None] * working(self.a2)[:, None, :]
        down = working(self.b1)[:, None, :] * working(self.b2)[None, :, :]
        return (Term(up.flatten(1), down.flatten(0, 1), self.scale),)

    def rows(self, start, stop):
        first = working(self.a1[start:stop]) @ working(self.b1)
        return self.scale * first * (working(self.a2[start:stop]) @ working(self.b2))
