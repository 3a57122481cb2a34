"""Tensors that are replaced by base + sum of strength * change: plain weights, norms, biases.

The change is added in float32 to the original, which is kept, and rounded once to its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..errors import NonFiniteError
from ..lowrank import to_dense
from ..terms import Term
from .change import Change, Rewrite, current, original, parameter_like
from .placed import owned
from .site import Part, Site
from .standing import Standing


@dataclass(frozen=True)
class Addend:
    """``strength * value`` on some rows; ``lora`` None: the strength is in it."""

    value: torch.Tensor | Term
    rows: slice
    lora: int | None

    def factor(self, strengths: Sequence[float]) -> float:
        """What the value (of a term: the product of its factors) is multiplied by."""
        strength = 1.0 if self.lora is None else strengths[self.lora]
        return strength * self.value.scale if isinstance(self.value, Term) else strength


@dataclass(eq=False)
class Sum:
    """Attribute ``name`` of a module as its original plus ``addends``."""

    name: str
    path: str
    addends: list[Addend]

    def delta(self, base: torch.Tensor, strengths: Sequence[float]) -> torch.Tensor:
        """The sum of the addends in float32, in the shape of ``base`` and on its device.

        Raises :class:`NonFiniteError` for a multiplier beyond float32.
        """
        total = torch.zeros(base.shape, dtype=torch.float32, device=base.device)
        for addend in self.addends:
            factor = addend.factor(strengths)
            if not abs(factor) <= torch.finfo(torch.float32).max:
                raise NonFiniteError(f"at this strength the change of {self.name} does not fit float32", key=self.path,
                                     found=f"a multiplier of {factor:.4g}")
            if isinstance(addend.value, Term):
                up, down = (values.to(base.device).float() for values in (addend.value.up, addend.value.down))
                total[addend.rows].addmm_(up, down, alpha=factor)
            else:
                total[addend.rows].add_(addend.value.to(base.device), alpha=factor)
        return total

    def active(self, strengths: Sequence[float]) -> bool:
        """Whether anything is to be added; if not, the result is the base itself, not a rounding of it."""
        return any(addend.lora is None or strengths[addend.lora] for addend in self.addends)

    def value(self, base: torch.Tensor, strengths: Sequence[float]) -> torch.Tensor:
        """The new value, in the dtype of ``base``; raises :class:`NonFiniteError` if it does not hold it."""
        if not self.active(strengths):
            return base.detach().clone()
        result = (base.detach().float() + self.delta(base, strengths)).to(base.dtype)
        if not torch.isfinite(result.float()).all():
            raise NonFiniteError(f"{self.name} with these LoRAs does not fit {base.dtype}", key=self.path)
        return result

    def prepare(self, owner, before, strengths, changed):
        if not any(addend.lora in changed for addend in self.addends):
            return None
        standing, value = current(owner, self.name), self.value(original(owner, self.name), strengths)
        # Not copied in place: whether the memory that stands there is ours to write to, nobody can tell.
        old = standing.data
        return Rewrite(lambda: setattr(standing, "data", value), lambda: setattr(standing, "data", old))


@dataclass
class BiasSum:
    """The bias of one module with the changes of some parts; empty where there are none."""

    site: Site
    strengths: Sequence[float]
    addends: list[Addend] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)

    def add_to(self, change: Change) -> None:
        if not self.addends:
            return
        name = getattr(self.site, "prefix", "") + "bias"
        live = Sum(name, self.site.path, self.addends)
        before = self.site.bare(name)
        change.values[name] = parameter_like(self.site.owner, name, live.value(before, self.strengths))
        change.live.append(live)
        change.fixed |= self.fixed


def bias_sum(site: Site, parts: Sequence[Part], strengths: Sequence[float],
             order: Callable[[torch.Tensor], torch.Tensor] = lambda vector: vector) -> BiasSum:
    """The bias changes of ``parts``; ``order`` brings a whole plain vector into the order in which it is stored."""
    result = BiasSum(site, strengths)
    for part in parts:
        for vector, lora in _vectors(site, part, strengths):
            whole = torch.zeros(site.out)
            whole[part.rows] = vector.float().cpu()
            result.addends.append(Addend(order(whole), slice(None), lora))
            if lora is None:
                result.fixed.add(part.lora)
    return result


def _vectors(site: Site, part: Part, strengths):
    if part.delta.bias is not None:
        yield part.delta.bias, part.lora
    if part.delta.rebias is not None:
        yield part.delta.rebias(site.bias()[part.rows], strengths[part.lora]), None


@dataclass
class WeightSum:
    """What each of ``parts`` adds to the weight; ``fixed``: the LoRAs that cannot be rescaled."""

    parts: list[tuple[Part, list[Addend]]]
    fixed: frozenset[int]

    @property
    def addends(self) -> list[Addend]:
        return [addend for _, found in self.parts for addend in found]


def weight_sum(site: Site, parts: Sequence[Part], strengths: Sequence[float]) -> WeightSum:
    """What ``parts`` add to the weight, kept as memory of its own."""
    standing = Standing(site, parts, strengths)
    found = [(part, _weight_addends(site, part, standing)) for part in parts]
    fixed = {part.lora for part, addends in found if any(one.lora is None for one in addends)}
    return WeightSum(found, frozenset(fixed | standing.fixed))


def _weight_addends(site: Site, part: Part, standing: Standing) -> list[Addend]:
    delta, rows = part.delta, part.rows
    if delta.rebase is not None:
        return [Addend(to_dense(standing.rebase(part)), rows, None)]
    found = [Addend(Term(owned(term.up), owned(term.down), term.scale), rows, part.lora) for term in delta.terms]
    if delta.dense is not None:
        found.append(Addend(owned(to_dense(delta.dense)), rows, part.lora))
    if delta.replace is not None:
        found.append(Addend(delta.replace.float() - site.weight()[rows], rows, part.lora))
    return found
