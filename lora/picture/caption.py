"""The few lines above and below a map: what the file is, what the colours mean."""

from __future__ import annotations

from collections import Counter

from ..inspection import Survey
from ..inspection.chart import Chart, Row
from ..printable import printable, short


def headline(survey: Survey, chart: Chart) -> str:
    """What the file is, in one line."""
    changed = sum(cell.facts is not None for cell in chart.cells)
    parts = [chart.family, _kinds(survey), _ranks(survey), _scales(survey),
             f"{changed} of {len(chart.cells)} layers changed"]
    return "  ·  ".join(filter(None, parts))


def meaning(chart: Chart) -> str:
    """What a colour stands for."""
    if chart.end is None:
        return "layers that the file changes"
    usual = " of the usual ones" if chart.beyond else ""
    return f"root mean square of the change of one element, relative to the strongest layer{usual}"


def scale(chart: Chart) -> str:
    """Which layer is the end of the scale, and how strong it is."""
    cell = chart.end
    return "" if cell is None else f"100 % = {cell.name}: rms {cell.rms:.2e}, norm {cell.norm:.3g} at strength 1"


def beyond(chart: Chart) -> str:
    """How many layers are beyond the scale, and which is the strongest."""
    if not chart.beyond:
        return ""
    cell, others = chart.beyond[0], len(chart.beyond) - 1
    more = f", and {others} more" if others else ""
    return f"beyond the scale: {cell.name}, {cell.relative:.3g} times its end (rms {cell.rms:.2e}){more}"


def share(row: Row, chart: Chart) -> str:
    """The mean change of a row, relative to the end of the scale; "" where it is not known."""
    mean = row.mean_rms()
    return "" if mean is None or not chart.end or not chart.end.rms else f"{100 * mean / chart.end.rms:.0f} %"


def marks(chart: Chart) -> list[tuple[str, str]]:
    """(mark, what it means) of the cells without a colour of the ramp that are in this map; "" is the hatch."""
    cells = chart.cells
    found = [("", "not in the file")] if any(cell.facts is None for cell in cells) else []
    if chart.beyond:
        found.append(("+", beyond(chart)))
    if chart.measured and any(cell.facts is not None and cell.relative is None for cell in cells):
        found.append(("?", "not known: depends on the model's own weight, or is not a number"))
    return found


def notes(survey: Survey) -> list[str]:
    """Remarks on norms, each once, and what is left out."""
    counted = Counter(facts.note for facts in survey.layers if facts.note)
    found = [f"{note} ({number} {'layer' if number == 1 else 'layers'})" for note, number in counted.items()]
    for what, entries in (("skipped", survey.skipped), ("unknown", survey.unknown)):
        if entries:
            found.append(f"{len(entries)} keys {what}, such as {short(entries[0][0])}: {printable(entries[0][1])}")
    return found


def _kinds(survey: Survey) -> str:
    kinds = Counter(facts.kind for facts in survey.layers)
    return ", ".join(_KINDS.get(kind, kind) for kind, _ in kinds.most_common()) + (
        " with DoRA" if any(facts.dora for facts in survey.layers) else "")


_KINDS = {"lora": "LoRA", "lokr": "LoKr", "loha": "LoHa", "glora": "GLoRA", "oft": "OFT", "boft": "BOFT", "ia3": "IA3"}


def _ranks(survey: Survey) -> str:
    ranks = sorted({facts.rank for facts in survey.layers if facts.rank is not None})
    if not ranks:
        return ""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _scales(survey: Survey) -> str:
    scales = sorted({facts.scale for facts in survey.layers if facts.scale is not None})
    if not scales:
        return ""
    return f"scale {scales[0]:g}" if len(scales) == 1 else f"scales {scales[0]:g} to {scales[-1]:g}"
