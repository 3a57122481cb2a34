"""nn.Linear and norms: the change is added to the weight, in a new Parameter; the original is kept.

The weight may be a read-only mapping of a file, and in any float dtype; it is never written to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from ..errors import PlanError
from .change import Change, parameter_like
from .placed import line
from .site import Draft, Site, not_loaded
from .sums import Sum, bias_sum, weight_sum

#: Formats with so few bits that a small change may be rounded away: what is left of it is measured.
_COARSE = (torch.float8_e4m3fn, torch.float8_e5m2)


class LinearSite(Site):
    """A weight [out, in], or [out] for a norm; ``attribute`` is its name, "weight" for a module of its own."""

    kind = "linear"

    def __init__(self, path: str, owner: nn.Module, attribute: str = "weight"):
        self.attribute = attribute
        weight = getattr(owner, attribute)
        if weight is None or weight.is_meta:
            raise not_loaded(path)
        if weight.dim() not in (1, 2) or not weight.is_floating_point():
            raise PlanError("the weight is no matrix of floats", key=path, found=f"{list(weight.shape)} {weight.dtype}")
        out, inp = (*weight.shape, None)[:2]
        super().__init__(path, owner, out, inp)

    @property
    def has_bias(self):
        return self.attribute == "weight" and isinstance(self.bare("bias"), torch.Tensor)

    def weight(self):
        return self.bare(self.attribute).detach().float()

    def bias(self):
        return self.bare("bias").detach().float()

    def draft(self, parts, strengths, max_rank):
        return LinearDraft(self, parts, strengths)


class LinearDraft(Draft):
    def __init__(self, site: LinearSite, parts, strengths: Sequence[float]):
        self.site, self.strengths = site, strengths
        found = weight_sum(site, parts, strengths)
        self.addends, self.fixed = found.addends, found.fixed
        self.bias = bias_sum(site, parts, strengths)
        self.lines = [line(site, part, part.rank) for part, addends in found.parts if addends]

    def build(self, rank=None):
        site, change = self.site, Change(self.site.owner, self.site.path, {}, fixed=self.fixed)
        if self.addends:
            live = Sum(site.attribute, site.path, self.addends)
            base = site.bare(site.attribute)
            value = live.value(base, self.strengths)
            change.values[site.attribute] = parameter_like(site.owner, site.attribute, value)
            change.live.append(live)
            if value.dtype in _COARSE:
                self._measure(base, value, live)
        self.bias.add_to(change)
        return change

    def _measure(self, base, value, live: Sum) -> None:
        """Put the share of the change that the rounding left into the report's lines."""
        share = kept(live.delta(base, self.strengths), value.float() - base.detach().float())
        self.lines = [dataclasses.replace(one, kept=share) for one in self.lines]


def kept(wanted: torch.Tensor, applied: torch.Tensor) -> float:
    """Projection of the change that was ``applied`` on the one ``wanted``: 1 is all of it."""
    energy = wanted.double().square().sum().item()
    return (wanted.double() * applied.double()).sum().item() / energy if energy else 1.0
