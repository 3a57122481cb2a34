"""More terms than the kernels have ranks for: which of them get how many.

Each term is truncated by its own SVD, so that the terms of different LoRAs stay apart and strengths can still be
changed. The ranks go, a fragment at a time, to the term whose next singular values weigh most at the present
strengths, measured against all that is to be done to the same rows of the module. So a part that needs few ranks gets
them all, the others share what is left by need, and no part (q, k or v) is given up because another one has larger
numbers: the sum of the squared relative errors of the parts is the least possible.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..errors import PlanError
from ..packing import SIDE
from ..report import Applied
from ..spectrum import Spectrum, spectrum
from .placed import Branch, Placed
from .site import Site

#: Relative error of a truncation in float32 that drops nothing.
_ROUNDING = 1e-5


def squeeze(branch: Branch, site: Site, strengths: Sequence[float], room: int) -> Branch:
    """The branch in at most ``room`` ranks.

    A LoRA at strength 0 gets what the others leave, and is fixed to its strength where that is not all it needs; so
    is one of which a term got no rank at all: turned up it would still be without effect. Raises :class:`PlanError` if
    there is no room.
    """
    if room < SIDE:
        raise PlanError("the low-rank branch has no rank left for a LoRA", key=site.path, found=f"{room} ranks free")
    spectra = [spectrum(one.term, room) for one in branch.placed]
    energies = [one.energies for one in spectra]
    ranks = _allot(branch.placed, energies, strengths, room)
    placed = [_truncated(*one) for one in zip(branch.placed, spectra, ranks) if one[-1]]
    errors = _errors(branch.placed, energies, ranks)
    fixed = {lora for (lora, _), error in errors.items() if error > _ROUNDING and not strengths[lora]}
    fixed |= {one.part.lora for one, values, rank in zip(branch.placed, energies, ranks) if not rank and values.any()}
    lines = [_with_error(one, errors.get((one.lora, one.source), 0.0)) for one in branch.lines]
    return Branch(placed, lines, branch.fixed | fixed)


def _allot(placed: Sequence[Placed], energies: Sequence[torch.Tensor], strengths, room: int) -> list[int]:
    """How many ranks each term gets: the chunks of 16 singular values that weigh most among all."""
    factors = [1.0 if one.lora is None else abs(strengths[one.lora]) for one in placed]
    totals: dict[tuple[int, int], float] = defaultdict(float)
    for one, values, factor in zip(placed, energies, factors):
        totals[one.rows.start, one.rows.stop] += values.sum().item() * factor ** 2
    chunks = []
    for number, (one, values, factor) in enumerate(zip(placed, energies, factors)):
        weight = (factor or 1.0) ** 2 / (totals[one.rows.start, one.rows.stop] or 1.0)
        chunks += [(factor > 0, chunk.sum().item() * weight, number, len(chunk)) for chunk in values.split(SIDE)]
    ranks = [0] * len(placed)
    for _, energy, number, size in sorted(chunks, reverse=True):
        if energy and size <= room:
            ranks[number] += size
            room -= size
    return ranks


def _truncated(one: Placed, spectrum: Spectrum, rank: int) -> Placed:
    return one if rank >= one.term.rank else replace(one, term=spectrum.leading(rank))


def _errors(placed: Sequence[Placed], energies: Sequence[torch.Tensor], ranks: Sequence[int]) -> dict:
    """Relative error of what each layer of each LoRA loses."""
    lost, total = defaultdict(float), defaultdict(float)
    for one, values, rank in zip(placed, energies, ranks):
        source = one.part.lora, str(one.part.target)
        total[source] += values.sum().item()
        lost[source] += values[rank:].sum().item()
    return {source: math.sqrt(lost[source] / total[source]) if total[source] else 0.0 for source in total}


def _with_error(applied: Applied, error: float) -> Applied:
    if error < _ROUNDING:
        return applied
    return replace(applied, error=max(error, applied.error), note="truncated to the kernels' limit of ranks")
