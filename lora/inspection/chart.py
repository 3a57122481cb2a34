"""The map of one file as data: a cell for each component in each block. The text table and all pictures draw it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .layout import Component
from .survey import LayerFacts, Survey


@dataclass(frozen=True)
class Cell:
    """A component in a block that has it; ``facts`` is None where the file leaves it as it is.

    ``norm``: Frobenius norm of the change. ``rms``: root mean square of its elements, comparable between layers of
    different sizes. ``relative``: rms over that of the cell which is the end of the scale. None where the norm is not
    known.
    """

    label: str
    block: str
    index: int
    facts: LayerFacts | None = None
    norm: float | None = None
    rms: float | None = None
    relative: float | None = None

    @property
    def beyond(self) -> bool:
        """Whether it is stronger than the end of the scale."""
        return self.relative is not None and self.relative > 1

    @property
    def name(self) -> str:
        """The layer's name in the model."""
        return f"{self.block}.{self.index}.{self.label}" if self.block else self.label


@dataclass
class Row:
    """One component: ``cells`` for each block in the order of the map, None where the model has no such layer."""

    component: Component
    cells: list[Cell | None]

    @property
    def label(self) -> str:
        return self.component.label

    @property
    def present(self) -> list[Cell]:
        return [cell for cell in self.cells if cell is not None and cell.facts is not None]

    @property
    def missing(self) -> list[Cell]:
        return [cell for cell in self.cells if cell is not None and cell.facts is None]

    def mean_rms(self) -> float | None:
        """Root mean square over the cells whose change is known."""
        known = [cell.rms for cell in self.present if cell.rms is not None]
        return (sum(value * value for value in known) / len(known)) ** 0.5 if known else None


@dataclass
class Chart:
    """``groups``: (block list, its length), left to right. ``singles``: the file's modules outside of blocks.

    ``end``: the cell that the others are relative to, the strongest but for a few that would leave all others
    without colour; ``beyond``: these few, the strongest first.
    """

    name: str
    family: str
    groups: list[tuple[str, int]]
    rows: list[Row]
    singles: list[Cell] = field(default_factory=list)
    end: Cell | None = None
    beyond: list[Cell] = field(default_factory=list)
    measured: bool = False

    @property
    def cells(self) -> list[Cell]:
        """All cells that the model has, also those that the file leaves as they are."""
        return [cell for row in self.rows for cell in row.cells if cell is not None] + self.singles


def chart(survey: Survey) -> Chart:
    """The map of ``survey``. Norms of norms' weights are a row only where the file changes some."""
    found = {(spot.component, spot.block, spot.index): (facts, number)
             for facts in survey.layers for number, spot in enumerate(facts.spots)}
    end = _end_of_scale([facts.rms(number) for facts, number in found.values()])
    layout = survey.layout
    changed = {component for component, _, _ in found}

    def cell(component, block, index):
        if block is not None and block not in component.depths:
            return None
        facts, number = found.get((component, block, index), (None, 0))
        return _cell(component.label, block or "", index, facts, number, end)

    result = Chart(
        survey.name, survey.family.title, [(block.name, block.depth) for block in survey.family.blocks],
        [Row(component, [cell(component, *column) for column in layout.columns])
         for component in layout.components if not component.norm or component in changed],
        [cell(component, None, 0) for component in layout.singles if component in changed], measured=survey.measured)
    strongest = sorted((c for c in result.cells if c.rms is not None), key=lambda c: -c.rms)
    result.beyond = [c for c in strongest if c.beyond]
    result.end = next((c for c in strongest if not c.beyond), None)
    return result


#: A cell this many times as strong as nearly all others would leave them without colour.
_APART = 5
_NEARLY_ALL = 0.95


def _end_of_scale(found: list[float | None]) -> float | None:
    """The largest rms that is not far from the others."""
    known = sorted(value for value in found if value)
    if not known:
        return None if all(value is None for value in found) else 0.0
    usual = known[math.ceil(_NEARLY_ALL * len(known)) - 1]
    return max(value for value in known if value <= _APART * usual)


def _cell(label, block, index, facts: LayerFacts | None, number: int, end: float | None) -> Cell:
    if facts is None:
        return Cell(label, block, index)
    rms = facts.rms(number)
    relative = None if rms is None else (rms / end if end else 0.0)
    norm = facts.spot_norms[number] if facts.spot_norms else None
    return Cell(label, block, index, facts, norm, rms, relative)
