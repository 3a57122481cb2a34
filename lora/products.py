"""Inner products of changes of weights, in float64, through their factors wherever they have some.

<X, Y> is the sum of the products of all elements. It is bilinear, so it is formed part by part:

    U1 D1 with U2 D2     sum over (U1^T U2) * (D1 D2^T), matrices of the size of the ranks
                         or block of rows by block, where the ranks are higher than pays
    U D with W1 x W2     sum over U * (W1 x W2) D^T; the Kronecker product is applied to each row of D, never built
    W1 x W2 with V1 x V2 <W1, V1> <W2, V2>, where the factors have the same sizes
    anything else        block of rows by block
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .lowrank import BLOCK, rows_pay
from .structured import Kronecker, Structured
from .terms import Term

#: A part of a change and its factor: a pair (up, down), a Structured, or a tensor [out, in] or [dim].
Part = "tuple[float, tuple[torch.Tensor, torch.Tensor] | Structured | torch.Tensor]"


def part_of_terms(terms: Sequence[Term]) -> Part:
    """All terms as one pair in float64, their scales in ``up``."""
    up = torch.cat([term.up.double() * term.scale for term in terms], dim=1)
    return 1.0, (up, torch.cat([term.down.double() for term in terms]))


def part_of(factor: float, change: torch.Tensor | Structured) -> Part:
    """A structured change, as a pair of factors where that is small enough to pay, or a dense one."""
    structured = isinstance(change, Structured) and not isinstance(change, Kronecker)
    if structured and 4 * change.exact_rank <= min(change.shape):
        scale, pair = part_of_terms(change.terms())
        return factor * scale, pair
    return factor, change


def inner(first: Sequence[Part], second: Sequence[Part]) -> float:
    """<X, Y> of two changes of one shape, each the sum of its parts."""
    return sum(a * b * _product(x, y) for a, x in first for b, y in second)


def _product(x, y) -> float:
    if isinstance(y, tuple) and not isinstance(x, tuple):
        x, y = y, x
    if isinstance(x, tuple) and isinstance(y, tuple) and not _rows_pay(x, y):
        return ((x[0].T @ y[0]) * (x[1] @ y[1].T)).sum().item()
    if isinstance(x, tuple) and isinstance(y, Kronecker):
        return (x[0] * _times(y, x[1])).sum().item()
    if isinstance(x, Kronecker) and isinstance(y, Kronecker):
        (a, b), (c, d) = _doubled(x), _doubled(y)
        if a.shape == c.shape and b.shape == d.shape:
            return x.scale * y.scale * (a * c).sum().item() * (b * d).sum().item()
    rows = (x if isinstance(x, torch.Tensor) else x[0] if isinstance(x, tuple) else x).shape[0]
    return sum((_rows(x, start, min(start + BLOCK, rows)) * _rows(y, start, min(start + BLOCK, rows))).sum().item()
               for start in range(0, rows, BLOCK))


def _rows_pay(x, y) -> bool:
    (up, down), other = x, y[1]
    return rows_pay((up.shape[0], down.shape[1]), max(len(down), len(other)))


def _times(kronecker: Kronecker, down: torch.Tensor) -> torch.Tensor:
    """(W1 x W2) down^T, [out, r]: row by row of ``down`` [r, in], seen as a matrix X, it is W1 X W2^T."""
    w1, w2 = _doubled(kronecker)
    rows = down.view(len(down), w1.shape[1], w2.shape[1])
    return kronecker.scale * (w1 @ rows @ w2.T).flatten(1).T


def _doubled(kronecker: Kronecker):
    return tuple(matrix.double() for matrix in kronecker.matrices())


def _rows(x, start: int, stop: int) -> torch.Tensor:
    if isinstance(x, tuple):
        return x[0][start:stop] @ x[1]
    return (x.rows(start, stop) if isinstance(x, Structured) else x[start:stop]).double()
