"""The map of a family: components down, blocks across. Where on it a layer of a file lies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..families import Family, Module
from ..keys import Target


@dataclass(frozen=True, eq=False)
class Component:
    """One kind of source layer: ``label`` is its name inside a block, as people know it ("attn.to_q").

    ``depths``: block list -> how many blocks have it. ``norm``: a norm's weight, which LoRAs rarely touch.
    """

    label: str
    module: str
    part: str | None
    norm: bool
    depths: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.depths.values())


@dataclass(frozen=True)
class Spot:
    """One cell of the map: a component in a block ("layers", 3), or (None, 0) for a module outside of blocks."""

    component: Component
    block: str | None
    index: int


class Layout:
    """The map of ``family``: ``components`` of the blocks, ``singles`` outside of them, ``columns`` (block, index)."""

    def __init__(self, family: Family):
        self.family = family
        self._found: dict[tuple[str, str | None], Component] = {}
        for block in family.blocks:
            for module in block.modules:
                self._add(module, block.name, block.depth)
        self.components = list(self._found.values())
        self.singles = [_single(module) for module in family.singles]
        self.columns = [(block.name, index) for block in family.blocks for index in range(block.depth)]

    def _add(self, module: Module, block: str, depth: int) -> None:
        for part, names in module.parts or ((None, (module.name,)),):
            component = self._found.get((module.name, part))
            if component is None:
                component = Component(names[0], module.name, part, module.inp is None, {})
                self._found[module.name, part] = component
            component.depths[block] = depth

    @cached_property
    def _singles(self) -> dict[str, Component]:
        return {component.module: component for component in self.singles}

    def spots(self, target: Target) -> list[Spot]:
        """The cells that ``target`` covers: one, or that of each part for a layer that is fused in the file."""
        if target.module in self._singles:
            return [Spot(self._singles[target.module], None, 0)]
        module = self.family.module(target.module)
        block, _, index = target.module.removesuffix("." + module.name).rpartition(".")
        parts = [target.part] if target.part is not None else [part for part, _ in module.parts] or [None]
        return [Spot(self._found[module.name, part], block, int(index)) for part in parts]


def _single(module: Module) -> Component:
    return Component(module.name, module.name, None, module.inp is None, {})

