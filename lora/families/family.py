"""What a family of models is to this package: its modules' names, in every spelling that files use.

A name is never split at its underscores. Every spelling is written down (dotted), its flat form
(dots as underscores) is derived, and a look-up in the table of both decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

#: A module in a table of names, and the part of its rows (None: all of them).
Place = tuple[str, "str | None"]


@dataclass(frozen=True)
class Module:
    """One kind of module of a block, or one module that stands alone.

    ``name``     canonical name inside the block: the one of ComfyUI-nunchaku's model.
    ``out``      rows of the original weight, as a key of the family's ``dims``.
    ``inp``      columns, likewise; None for a norm, whose weight is [out].
    ``parts``    for a module that fuses several layers: (part, names of its source layer), in row
                 order; all parts have the same number of rows.
    ``aliases``  other names that mean the whole module.
    """

    name: str
    out: str
    inp: str | None
    parts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    aliases: tuple[str, ...] = ()

    def spellings(self) -> Iterator[tuple[str, Place]]:
        """(dotted name inside the block, (canonical name, part)) for everything files may say."""
        for name in (self.name, *self.aliases):
            yield name, (self.name, None)
        for part, names in self.parts:
            for name in names:
                yield name, (self.name, part)


@dataclass(frozen=True)
class Block:
    """A list of equal blocks: ``<name>.0`` to ``<name>.<depth - 1>``, each with ``modules``."""

    name: str
    depth: int
    modules: tuple[Module, ...]


@dataclass(frozen=True)
class Family:
    """A model architecture.

    ``name``     identifier, such as "qwen-image".
    ``title``    what people call it.
    ``dims``     extents of the published model, referred to by the modules.
    ``blocks``   its block lists.
    ``singles``  modules outside of blocks.
    ``marks``    regex on a key: what only this family has, among those that share names with it.
    """

    name: str
    title: str
    dims: dict[str, int]
    blocks: tuple[Block, ...]
    singles: tuple[Module, ...]
    marks: re.Pattern
    _tables: dict = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def _block_pattern(self) -> re.Pattern:
        names = "|".join(re.escape(block.name) for block in self.blocks)
        return re.compile(rf"({names})([._])(0|[1-9][0-9]{{0,8}})\2(.+)", re.DOTALL)

    @cached_property
    def _block_names(self) -> dict[tuple[str, str], dict[str, Place]]:
        """(block list, separator) -> name inside the block -> place."""
        tables = {}
        for block in self.blocks:
            dotted = dict(spelling for module in block.modules for spelling in module.spellings())
            tables[block.name, "."] = dotted
            tables[block.name, "_"] = {name.replace(".", "_"): place for name, place in dotted.items()}
        return tables

    @cached_property
    def _single_names(self) -> dict[str, Place]:
        dotted = dict(spelling for module in self.singles for spelling in module.spellings())
        return {**{name.replace(".", "_"): place for name, place in dotted.items()}, **dotted}

    @cached_property
    def _modules(self) -> dict[tuple[str | None, str], Module]:
        table = {(block.name, module.name): module for block in self.blocks for module in block.modules}
        table.update({(None, module.name): module for module in self.singles})
        return table

    def find(self, stem: str) -> Place | None:
        """(canonical module, part) that the module name ``stem`` means, dotted or flat; None if it means nothing."""
        match = self._block_pattern.fullmatch(stem)
        if match is None:
            return self._single_names.get(stem)
        block, separator, index, name = match.groups()
        place = self._block_names[block, separator].get(name)
        return place and (f"{block}.{index}.{place[0]}", place[1])

    def module(self, canonical: str) -> Module | None:
        """The :class:`Module` that the canonical name of a target belongs to."""
        match = self._block_pattern.fullmatch(canonical)
        if match is None:
            return self._modules.get((None, canonical))
        return self._modules.get((match.group(1), match.group(4)))

    def shape(self, canonical: str, part: str | None = None, dims: dict[str, int] | None = None) -> tuple[int, ...]:
        """Shape of the original weight of a target: [out, in], or [out] for a norm.

        ``dims`` replaces the published extents (for small models). Raises ``KeyError`` for an unknown name.
        """
        module = self.module(canonical)
        if module is None:
            raise KeyError(canonical)
        dims = {**self.dims, **(dims or {})}
        out = dims[module.out] // (len(module.parts) if part is not None else 1)
        return (out,) if module.inp is None else (out, dims[module.inp])

    def targets(self, blocks: int | None = None) -> Iterator[Place]:
        """Every source layer in canonical form: fused modules as their parts; at most ``blocks`` of each list."""
        for block in self.blocks:
            for index in range(block.depth if blocks is None else min(blocks, block.depth)):
                for module in block.modules:
                    yield from _sources(module, f"{block.name}.{index}.{module.name}")
        for module in self.singles:
            yield from _sources(module, module.name)

    def spellings(self) -> Iterator[str]:
        """Every known dotted name, block numbers written as #."""
        for (block, separator), names in self._block_names.items():
            if separator == ".":
                yield from (f"{block}.#.{name}" for name in names)
        yield from (name for module in self.singles for name, _ in module.spellings())


def _sources(module: Module, canonical: str) -> Iterator[Place]:
    for part in [part for part, _ in module.parts] or [None]:
        yield canonical, part
