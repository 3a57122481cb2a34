"""Parts of LoRAs as low-rank terms of one module: what a module with a low-rank branch is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .. import lowrank
from ..errors import PlanError
from ..packing import SIDE
from ..report import Applied
from ..terms import Term
from .site import Part, Site


#: Relative error of a truncation in float32 that drops nothing.
_ROUNDING = 1e-5


@dataclass(slots=True)
class Placed:
    """``term`` on ``rows`` of a module. ``lora`` is whose strength multiplies it; None: the strength is in it."""

    term: Term
    rows: slice
    lora: int | None
    part: Part


@dataclass
class Branch:
    """Everything that is to be appended to one module's low-rank branch."""

    placed: list[Placed]
    lines: list[Applied]
    fixed: frozenset[int] = frozenset()

    @property
    def ranks(self) -> int:
        return sum(placed.term.rank for placed in self.placed)


def gather(site: Site, parts: Sequence[Part], strengths: Sequence[float], max_rank: int) -> Branch:
    """The weight changes of ``parts`` as terms.

    Terms of an adapter stay as they are. What is dense is truncated to ``max_rank`` by SVD. What depends on
    the base weight is computed for this strength, and fixed to it. Raises :class:`UnsupportedAdapter` if the
    base weight cannot be rebuilt.
    """
    branch, fixed = Branch([], []), set()
    for part in parts:
        terms, error = list(part.delta.terms), 0.0
        if part.delta.rebase is not None:
            change = part.delta.rebase(site.weight()[part.rows], strengths[part.lora])
            found, error = lowrank.truncate(change, max_rank)
            branch.placed += [Placed(term, part.rows, None, part) for term in found]
            rank = sum(term.rank for term in found)
            fixed.add(part.lora)
        else:
            dense = _dense(site, part)
            if dense is not None:
                found, error = lowrank.truncate(dense, max_rank)
                terms += found
            branch.placed += [Placed(term, part.rows, part.lora, part) for term in terms]
            rank = sum(term.rank for term in terms)
        if rank:
            branch.lines.append(line(site, part, rank, error))
    branch.fixed = frozenset(fixed)
    return branch


def _dense(site: Site, part: Part):
    if part.delta.replace is not None:
        return part.delta.replace.float() - site.weight()[part.rows]
    return part.delta.dense


def line(site: Site, part: Part, rank: int | None, error: float = 0.0, **facts) -> Applied:
    """The report's line of ``part`` in ``site``."""
    return Applied(part.lora, site.path, str(part.target), rank, part.scale, error, note=part.delta.note, **facts)


def squeeze(branch: Branch, site: Site, strengths: Sequence[float], room: int) -> Branch:
    """The branch in at most ``room`` ranks, a multiple of 16: each group of rows gets an even share of them.

    Within a group each term is truncated by its own SVD to as many ranks as its singular values, at the present strengths,
    earn it among the others'. The terms of different LoRAs stay apart, so that strengths can still be changed; but a LoRA at
    strength 0 gets what the others leave, and is fixed to it where that is not all it needs.
    """
    groups: dict[tuple[int, int], list[Placed]] = {}
    for one in branch.placed:
        groups.setdefault((one.rows.start, one.rows.stop), []).append(one)
    placed, errors = [], {}
    for count, group in enumerate(sorted(groups.values(), key=_ranks)):
        share = room // (len(groups) - count) // SIDE * SIDE
        if share < SIDE:
            raise PlanError("the low-rank branch has no rank left for a LoRA", key=site.path, found=f"{room} ranks free")
        kept = group if _ranks(group) <= share else _truncated(group, strengths, share, errors)
        placed += kept
        room -= _ranks(kept)
    lines = [_with_error(one, errors.get((one.lora, one.source), 0.0)) for one in branch.lines]
    muted = {lora for (lora, _), error in errors.items() if error > _ROUNDING and not strengths[lora]}
    return Branch(placed, lines, branch.fixed | muted)


def _truncated(group: list[Placed], strengths, share: int, errors: dict) -> list[Placed]:
    """The terms of ``group`` in ``share`` ranks in all; relative errors by LoRA and layer are added to ``errors``."""
    kept = []
    for one, rank in zip(group, _allot(group, strengths, share)):
        source = (one.part.lora, str(one.part.target))
        if rank >= one.term.rank:
            kept.append(one)
        elif rank == 0:
            errors[source] = 1.0
        else:
            (term,), errors[source] = lowrank.compress([one.term], rank)
            kept.append(Placed(term, one.rows, one.lora, one.part))
    return kept


def _allot(group: list[Placed], strengths, share: int) -> list[int]:
    """How many ranks each term gets: in steps of a fragment, to the one whose next 16 singular values weigh most."""
    weights = []
    for number, one in enumerate(group):
        strength = 1.0 if one.lora is None else abs(strengths[one.lora])
        energies = _energies(one.term) * (strength or 1.0) ** 2
        weights += [(strength > 0, energies[start:start + SIDE].sum().item(), number)
                    for start in range(0, len(energies), SIDE)]
    ranks = [0] * len(group)
    for _, _, number in sorted(weights, reverse=True)[:share // SIDE]:
        ranks[number] += SIDE
    return ranks


def _energies(term: Term) -> torch.Tensor:
    """Squared singular values of a term, descending: eigenvalues of up^T up times down down^T, made symmetric."""
    up, down = (factor.float() for factor in (term.up, term.down))
    values, vectors = torch.linalg.eigh((up.T @ up).double())
    root = vectors * values.clamp(min=0).sqrt()
    found = torch.linalg.eigvalsh(root.T @ (down @ down.T).double() @ root)
    return found.clamp(min=0).flip(0) * term.scale ** 2


def _ranks(group: Sequence[Placed]) -> int:
    return sum(placed.term.rank for placed in group)


def _with_error(applied: Applied, error: float) -> Applied:
    if error < _ROUNDING:
        return applied
    return replace(applied, error=max(error, applied.error), note="truncated to the kernels' limit of ranks")


def owned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without gradient, as memory of its own: the file it comes from may be gone later."""
    return tensor.detach().clone()
