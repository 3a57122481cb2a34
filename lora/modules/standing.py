"""The weight as each LoRA of a stack meets it.

ComfyUI applies one file after the other. For changes that are only added the order makes no difference;
one that looks at the weight (DoRA, OFT, ...) sees what the files before it have made of that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..lowrank import to_dense
from .site import Part, Site


class Standing:
    """``parts`` of one module in the order of the stack; ``fixed``: LoRAs whose effect a later one has looked at."""

    def __init__(self, site: Site, parts: Sequence[Part], strengths: Sequence[float]):
        self.site, self.strengths = site, strengths
        last = max((number for number, part in enumerate(parts) if part.delta.rebase is not None), default=0)
        self.parts, self.seen = parts[:last + 1], parts[:last]
        self.fixed: set[int] = set()
        self.weight, self.added = None, 0

    def rebase(self, part: Part):
        """The change of ``part``, whose delta has a ``rebase``: a tensor or terms, its strength included."""
        number = next(number for number, one in enumerate(self.parts) if one is part)
        before = [one for one in self.seen[:number] if _overlap(one.rows, part.rows, self.site.out)]
        self.fixed |= {one.lora for one in before}
        if self.weight is None:
            self.weight = self.site.weight()
        if before:
            self._advance(number)
        return part.delta.rebase(self.weight[part.rows], self.strengths[part.lora])

    def _advance(self, number: int) -> None:
        """Add everything up to part ``number``."""
        if not self.added:
            # It may be the very memory of the base.
            self.weight = self.weight.clone()
        for one in self.seen[self.added:number]:
            rows = self.weight[one.rows]
            rows += _change(one, rows, self.strengths[one.lora])
        self.added = number


def _change(part: Part, weight: torch.Tensor, strength: float) -> torch.Tensor:
    delta = part.delta
    if delta.rebase is not None:
        return to_dense(delta.rebase(weight, strength)).to(weight)
    change = torch.zeros_like(weight)
    if not strength:
        return change
    if delta.terms:
        change += to_dense(delta.terms).to(weight)
    if delta.dense is not None:
        change += to_dense(delta.dense).to(weight)
    if delta.replace is not None:
        change += delta.replace.to(weight) - weight
    return change.mul_(strength)


def _overlap(one: slice, other: slice, extent: int) -> bool:
    (first, end, _), (start, stop, _) = one.indices(extent), other.indices(extent)
    return first < stop and start < end
