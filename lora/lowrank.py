"""Low-rank algebra on changes of weights: norms, exact sums, truncation at a stated error.

Every function takes a *change*: a tensor [out, in], a :class:`Structured`, a :class:`Term` or a
sequence of terms. What is given by factors is never built as a whole, except by :func:`to_dense`.
Results are deterministic: the random start of the subspace iteration has a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .errors import NonFiniteError
from .structured import Kronecker, Structured, working
from .terms import Term

Change = "torch.Tensor | Structured | Term | Sequence[Term]"

#: Rows of a dense block that are worked on at a time: a block of 12288 columns is 24 MB in float32.
BLOCK = 512

#: Below this extent a full SVD is cheaper than an iteration, and exact.
FULL_SVD = 256

_OVERSAMPLING = 16
_ITERATIONS = 5


def to_dense(change: Change) -> torch.Tensor:
    """The change as an [out, in] matrix, float32 (float64 if it holds float64), scale included."""
    if isinstance(change, torch.Tensor):
        return working(change)
    view = _Rows(change)
    return view.rows(0, view.shape[0])


def norm(change: Change) -> float:
    """Frobenius norm, in float64. Of terms it is computed from Gram matrices, r x r, without the product."""
    if isinstance(change, Term):
        change = (change,)
    if isinstance(change, Kronecker):
        w1, w2 = change.matrices()
        return abs(change.scale) * _frobenius(w1) * _frobenius(w2)
    change = cheapest(change)
    if isinstance(change, (torch.Tensor, Structured)):
        return math.sqrt(_Rows(change).energy())
    if not change:
        return 0.0
    if rows_pay(change[0].shape, sum(term.rank for term in change)):
        return math.sqrt(_Rows(change).energy())
    up, down = stack(change)
    # ||U D||^2 = trace(D^T U^T U D) = sum of (U^T U) * (D D^T)
    energy = ((up.T @ up).double() * (down @ down.T).double()).sum().item()
    return math.sqrt(max(energy, 0.0))


def rows_pay(shape: tuple[int, int], rank: int) -> bool:
    """Whether the product of two factors is smaller than they are: then Gram matrices, rank x rank, are no gain."""
    return math.prod(shape) < sum(shape) * rank


def cheapest(change: Change) -> Change:
    """A structured change as terms where Gram matrices of these take less time than its rows."""
    if not isinstance(change, Structured):
        return change
    (out, inp), rank = change.shape, change.exact_rank
    return change.terms() if (out + inp) * rank**2 < out * inp else change


def stack(terms: Sequence[Term]) -> tuple[torch.Tensor, torch.Tensor]:
    """Terms of one layer as one pair: up [out, R] with the scales in it, down [R, in], R the sum of the ranks."""
    up = torch.cat([working(term.up) * term.scale for term in terms], dim=1)
    down = torch.cat([working(term.down) for term in terms], dim=0)
    return _same_dtype(up, down)


def compress(terms: Sequence[Term], max_rank: int) -> tuple[tuple[Term, ...], float]:
    """The best approximation of a sum of terms by one term of at most ``max_rank``, and its relative error.

    Terms whose ranks add up to no more come back as they are, with error 0. Two QR decompositions
    and the SVD of an R x R matrix, R the sum of the ranks; exact up to float32 rounding.
    """
    _check_rank(max_rank)
    terms = tuple(terms)
    if sum(term.rank for term in terms) <= max_rank:
        return terms, 0.0
    up, down = stack(terms)
    if up.shape[1] >= min(up.shape[0], down.shape[1]):
        return _truncate_rows(_Rows(terms), max_rank)
    basis_up, core_up = torch.linalg.qr(up)
    basis_down, core_down = torch.linalg.qr(down.T)
    left, values, right = torch.linalg.svd(finite(core_up @ core_down.T), full_matrices=False)
    kept = values[:max_rank]
    term = Term(basis_up @ (left[:, :max_rank] * kept), right[:max_rank] @ basis_down.T)
    return (term,), _ratio(values[max_rank:].double().square().sum().item(), values.double().square().sum().item())


def truncate(change: Change, max_rank: int) -> tuple[tuple[Term, ...], float]:
    """The change as terms of at most ``max_rank`` in sum, and the relative error ||change - terms|| / ||change||.

    Exact (error 0) where the change is known to have no higher rank. Otherwise the best
    approximation, by an SVD: of the factors (Kronecker products, terms), full (small matrices),
    or by subspace iteration (Halko, Martinsson, Tropp: "Finding structure with randomness"),
    which comes within a percent of the best; the error given is the true one of the terms returned.
    """
    _check_rank(max_rank)
    if isinstance(change, Term):
        change = (change,)
    if isinstance(change, Structured) and change.exact_rank <= max_rank:
        return change.terms(), 0.0
    if isinstance(change, Kronecker):
        return _truncate_kronecker(change, max_rank)
    if isinstance(change, (torch.Tensor, Structured)):
        return _truncate_rows(_Rows(change), max_rank)
    return compress(change, max_rank)


def _check_rank(max_rank):
    if max_rank < 1:
        raise ValueError(f"max_rank is a positive number, not {max_rank}")


def _truncate_kronecker(change: Kronecker, max_rank):
    """Singular values of kron(W1, W2) are all products of one of W1 and one of W2, its vectors the products of theirs.

    The ``max_rank`` largest products need no more than ``max_rank`` values of either.
    """
    w1, w2 = (matrix.double() for matrix in change.matrices())
    (u1, s1, v1), (u2, s2, v2) = (_leading(_Rows(matrix), max_rank) for matrix in (w1, w2))
    products = torch.outer(s1, s2).flatten()
    kept = torch.argsort(products, descending=True, stable=True)[:max_rank]
    first, second = kept // len(s2), kept % len(s2)
    up = (u1[:, None, first] * u2[None, :, second]).flatten(0, 1) * products[kept]
    down = (v1[first][:, :, None] * v2[second][:, None, :]).flatten(1)
    energy = (_frobenius(w1) * _frobenius(w2)) ** 2
    dropped = energy - products[kept].square().sum().item()
    return (Term(up.float(), down.float(), change.scale),), _ratio(max(dropped, 0.0), energy)


def _truncate_rows(view: _Rows, max_rank):
    left, values, right = _leading(view, max_rank)
    up, down = left * values, right
    return (Term(up, down),), _ratio(view.residual(up, down), view.energy())


def _leading(view: _Rows, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ``count`` leading singular triples: U [out, k], values [k], V^T [k, in].

    By a full SVD where that is cheap. Else by subspace iteration on D^T D (each pass reads D
    once) and the SVD of D projected on the subspace found.
    """
    if min(view.shape) <= max(FULL_SVD, 2 * count):
        left, values, right = torch.linalg.svd(finite(view.rows(0, view.shape[0])), full_matrices=False)
    else:
        generator = torch.Generator().manual_seed(0)
        basis = torch.randn(view.shape[1], count + _OVERSAMPLING, generator=generator, dtype=view.dtype).to(view.device)
        for _ in range(_ITERATIONS):
            basis = torch.linalg.qr(finite(view.gram_times(basis))).Q
        left, values, right = torch.linalg.svd(view.times(basis), full_matrices=False)
        right = right @ basis.T
    return left[:, :count], values[:count], right[:count]


def finite(product: torch.Tensor) -> torch.Tensor:
    """``product``, or :class:`NonFiniteError`: finite factors may have products that no float32 can hold."""
    if not torch.isfinite(product).all():
        raise NonFiniteError(f"the change is too large for {str(product.dtype).removeprefix('torch.')}")
    return product


def _ratio(dropped: float, total: float) -> float:
    return math.sqrt(dropped / total) if total else 0.0


def _frobenius(matrix) -> float:
    return torch.linalg.vector_norm(matrix, dtype=torch.float64).item()


def _same_dtype(first, second):
    dtype = torch.promote_types(first.dtype, second.dtype)
    return first.to(dtype), second.to(dtype)


class _Rows:
    """A change seen as blocks of rows: what all algorithms here need to know of it."""

    def __init__(self, change: Change):
        if isinstance(change, Structured):
            self.shape, self.rows = change.shape, change.rows
        elif isinstance(change, torch.Tensor):
            self.shape, self.rows = tuple(change.shape), lambda start, stop: working(change[start:stop])
        else:
            up, down = stack((change,) if isinstance(change, Term) else change)
            self.shape, self.rows = (up.shape[0], down.shape[1]), lambda start, stop: up[start:stop] @ down
        first = self.rows(0, 1)
        self.dtype, self.device = first.dtype, first.device

    def blocks(self):
        for start in range(0, self.shape[0], BLOCK):
            stop = min(start + BLOCK, self.shape[0])
            yield start, stop, self.rows(start, stop)

    def energy(self) -> float:
        """Square of the Frobenius norm."""
        return sum(_frobenius(block) ** 2 for _, _, block in self.blocks())

    def times(self, right) -> torch.Tensor:
        return torch.cat([block @ right for _, _, block in self.blocks()])

    def gram_times(self, right) -> torch.Tensor:
        """D^T (D right), reading D once."""
        return sum(block.T @ (block @ right) for _, _, block in self.blocks())

    def residual(self, up, down) -> float:
        """Square of the Frobenius norm of D - up down."""
        return sum(_frobenius(block - up[start:stop] @ down) ** 2 for start, stop, block in self.blocks())
