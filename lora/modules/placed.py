"""Parts of LoRAs as low-rank terms of one module: what a module with a low-rank branch is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import lowrank
from ..report import Applied
from ..terms import Term
from .site import Part, Site
from .standing import Standing


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
    the weight is computed for these strengths, and fixed to them. Raises :class:`UnsupportedAdapter` if the
    base weight cannot be rebuilt.
    """
    branch, fixed, standing = Branch([], []), set(), Standing(site, parts, strengths)
    for part in parts:
        terms, error = list(part.delta.terms), 0.0
        if part.delta.rebase is not None:
            found, error = lowrank.truncate(standing.rebase(part), max_rank)
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
    branch.fixed = frozenset(fixed | standing.fixed)
    return branch


def _dense(site: Site, part: Part):
    if part.delta.replace is not None:
        return part.delta.replace.float() - site.weight()[part.rows]
    return part.delta.dense


def line(site: Site, part: Part, rank: int | None, error: float = 0.0, **facts) -> Applied:
    """The report's line of ``part`` in ``site``."""
    return Applied(part.lora, site.path, str(part.target), rank, part.scale, error, note=part.delta.note, **facts)


def owned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without gradient, as memory of its own: the file it comes from may be gone later."""
    return tensor.detach().clone()
