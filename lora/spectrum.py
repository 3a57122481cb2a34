"""The singular values of a term, and its leading part once it is known how many of them are kept.

Both come from Gram matrices: of the factors, rank x rank, or, where the matrix has no more singular values than the
term has ranks, of their product. Compared with the QR decompositions of lowrank.compress that is several times faster;
singular values below a few ten-thousandths of the largest one, which 16-bit factors do not hold either, are not told
from zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .lowrank import BLOCK, finite
from .structured import working
from .terms import Term

#: A sum of squares beyond these bounds is worked out in float64, before float32 cannot hold it.
_SMALL, _LARGE = 1e-30, 1e30


class Spectrum(NamedTuple):
    """``energies``: the squared singular values of a term, float64, descending.

    ``leading(k)``: the best approximation of the term by k ranks, float32, rows of its down factor orthonormal.
    """

    energies: torch.Tensor
    leading: Callable[[int], Term]


def spectrum(term: Term, most: int) -> Spectrum:
    """The spectrum of ``term``, of which up to ``most`` ranks will be asked for.

    Takes a float64 matrix of min(rank, out, in) squared and two more while it is decomposed. Raises
    :class:`NonFiniteError` for a product that float32 cannot hold.
    """
    return (_of_product if term.rank >= min(term.shape) else _of_factors)(term, most)


def _of_factors(term: Term, most: int) -> Spectrum:
    """With down = root Q^T, Q orthonormal: up down = (up root) Q^T, and (up root)^T (up root) = mix energies mix^T."""
    values, vectors = torch.linalg.eigh(_gram(term.down.T))
    widths = values.clamp(min=0).sqrt()
    root = vectors * widths
    energies, mix = _descending(root.T @ _gram(term.up) @ root)
    mix = mix[:, :most]
    inverse = torch.where(widths > 0, 1 / widths, 0.0)
    to_up, to_down = root @ mix, mix.T @ (vectors * inverse).T

    def leading(rank):
        up, down = working(term.up), working(term.down)
        return Term(up @ to_up[:, :rank].to(up.dtype), to_down[:rank].to(down.dtype) @ down, term.scale)

    return Spectrum(energies * term.scale ** 2, leading)


def _of_product(term: Term, most: int) -> Spectrum:
    """From the product times its transpose, or the other way round: the smaller one, summed up in blocks."""
    wide = term.shape[0] < term.shape[1]
    left, right = (term.down.T, term.up.T) if wide else (term.up, term.down)
    right = working(right)
    gram = torch.zeros(right.shape[1], right.shape[1], dtype=torch.float64, device=right.device)
    for rows in left.split(BLOCK):
        block = finite(working(rows) @ right).double()
        gram.addmm_(block.T, block)
    energies, vectors = _descending(gram)
    widths, basis = energies.sqrt()[:most], vectors[:, :most].to(right.dtype)

    def leading(rank):
        chosen = basis[:, :rank]
        other = working(left) @ (right @ chosen)
        if not wide:
            return Term(other, chosen.T, term.scale)
        width = widths[:rank].to(chosen.dtype)
        return Term(chosen * width, torch.where(width > 0, other / width, 0.0).T, term.scale)

    return Spectrum(energies * term.scale ** 2, leading)


def _gram(factor: torch.Tensor) -> torch.Tensor:
    """factor^T factor in float64, [r, r] of [n, r]."""
    values = working(factor)
    gram = (values.T @ values).double()
    if not _SMALL < gram.trace() < _LARGE:
        values = factor.double()
        gram = values.T @ values
    return gram


def _descending(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues of a matrix without negative ones, and its eigenvectors, the largest first."""
    values, vectors = torch.linalg.eigh(finite(gram))
    return values.clamp(min=0).flip(0), vectors.flip(1)
