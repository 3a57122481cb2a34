"""What two LoRAs, or stacks of LoRAs, change relative to each other, layer by layer, without a dense weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .families import Family
from .files import LoraFile
from .keys import Target
from .products import inner
from .progress import Progress, track
from .stack import Layer, layers, one_family

#: Squares of norms beyond this cannot be added up.
_LARGEST = 1e300

#: What one side of a comparison is: opened files, each with its strength.
Side = Sequence[tuple[LoraFile, float]]


@dataclass(frozen=True)
class LayerDifference:
    """One source layer of both sides; norms are Frobenius norms of the changes, strengths included.

    ``cosine``      of the angle between the changes: 1 the same direction, 0 unrelated; None where one is zero.
    ``difference``  norm of the difference of the changes.
    ``note``        why they cannot be compared; the numbers are None then.
    """

    target: Target
    first: float | None
    second: float | None
    cosine: float | None
    difference: float | None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Norm of the second change over that of the first."""
        return self.second / self.first if self.first and self.second is not None else None

    @property
    def relative(self) -> float | None:
        """Norm of the difference over the larger norm: 0 the same, 1 where one is missing, 2 opposite."""
        if self.difference is None:
            return None
        largest = max(self.first, self.second)
        return self.difference / largest if largest else 0.0


@dataclass(frozen=True, eq=False)
class Comparison:
    """``layers`` that either side touches, in the order of the first."""

    family: Family
    layers: list[LayerDifference]

    @property
    def total(self) -> LayerDifference:
        """All layers that can be compared, taken as one."""
        return together(self.layers)

    def components(self) -> dict[str, LayerDifference]:
        """The same for each kind of layer, by its name inside a block, in the model's order."""
        groups: dict[str, list[LayerDifference]] = {name: [] for name in self._names.values()}
        for layer in self.layers:
            module = self.family.module(layer.target.module)
            groups[self._names[module.name, layer.target.part]].append(layer)
        return {name: together(group) for name, group in groups.items() if group}

    @cached_property
    def _names(self) -> dict[tuple[str, str | None], str]:
        modules = [module for block in self.family.blocks for module in block.modules] + list(self.family.singles)
        return {(module.name, part): spellings[0]
                for module in modules for part, spellings in (*module.parts, (None, (module.name,)))}

    def only(self, side: int) -> list[LayerDifference]:
        """Layers that only side 0, or 1, changes."""
        other = ("second", "first")[side]
        return [layer for layer in self.layers if getattr(layer, other) == 0 and layer.difference]


def together(layers: Sequence[LayerDifference]) -> LayerDifference:
    """Layers taken as one long vector; those that could not be compared are left out."""
    known = [layer for layer in layers if layer.difference is not None]
    one, two, apart = (sum(getattr(layer, name) ** 2 for layer in known) for name in ("first", "second", "difference"))
    both = sum((layer.cosine or 0.0) * layer.first * layer.second for layer in known)
    return _difference(Target(f"{len(known)} layers"), one, two, both, apart)


def compare(first: Side, second: Side, progress: Progress | None = None) -> Comparison:
    """Compare two stacks of opened files. Raises :class:`LoraError` where they are for different models."""
    family = one_family([file for file, _ in [*first, *second]])
    apart = {target.module for file, _ in [*first, *second] for target in file.layers if target.part is not None}
    sides = layers(first, apart), layers(second, apart)
    targets = list(dict.fromkeys([*sides[0], *sides[1]]))
    return Comparison(family, [_compared(target, *(side.get(target, Layer()) for side in sides))
                               for target in track(targets, len(targets), "comparing", progress)])


def _compared(target: Target, one: Layer, two: Layer) -> LayerDifference:
    note = "; ".join(one.unknown + two.unknown) or _misfit(one, two)
    if note:
        return LayerDifference(target, None, None, None, None, note)
    ones, twos = one.parts(), two.parts()
    squares, both = (inner(ones, ones), inner(twos, twos)), inner(ones, twos)
    if not all(abs(square) < _LARGEST for square in (*squares, both)):
        return LayerDifference(target, None, None, None, None, "the changes are too large to be measured")
    return _difference(target, *squares, both, squares[0] - 2 * both + squares[1])


def _misfit(one: Layer, two: Layer) -> str:
    if None in (one.shape, two.shape) or one.shape == two.shape:
        return ""
    return f"the layers have different sizes: {list(one.shape)} and {list(two.shape)}"


def _difference(target: Target, one: float, two: float, both: float, apart: float) -> LayerDifference:
    """From the squares of the norms, the inner product, and the square of the difference's norm."""
    first, second = math.sqrt(max(one, 0.0)), math.sqrt(max(two, 0.0))
    cosine = max(-1.0, min(1.0, both / (first * second))) if first and second else None
    # Of two equal changes rounding leaves something like 1e-16 of their square.
    apart = 0.0 if apart < 1e-14 * max(one, two) else apart
    return LayerDifference(target, first, second, cosine, math.sqrt(apart))
