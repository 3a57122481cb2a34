"""The few lines above and below a map: what the file is, what the colours mean."""

from __future__ import annotations

from collections import Counter

from ..inspection import Survey
from ..inspection.chart import Chart


def headline(survey: Survey, chart: Chart) -> str:
    """What the file is, in one line."""
    changed = sum(cell.facts is not None for cell in chart.cells)
    parts = [chart.family, _kinds(survey), _ranks(survey), _scales(survey),
             f"{changed} of {len(chart.cells)} layers changed"]
    return "  ·  ".join(filter(None, parts))


def meaning(chart: Chart) -> str:
    """What a colour stands for."""
    if chart.strongest is None:
        return "layers that the file changes"
    return "root mean square of the change of one element, relative to the strongest layer"


def strongest(chart: Chart) -> str:
    """Which layer is the strongest, and how strong."""
    cell = chart.strongest
    return "" if cell is None else f"100 % = {cell.name}: rms {cell.rms:.2e}, norm {cell.norm:.3g} at strength 1"


def notes(survey: Survey) -> list[str]:
    """Remarks on norms, each once, and what is left out."""
    counted = Counter(facts.note for facts in survey.layers if facts.note)
    found = [f"{note} ({number} layers)" for note, number in counted.items()]
    for what, entries in (("skipped", survey.skipped), ("unknown", survey.unknown)):
        if entries:
            found.append(f"{len(entries)} keys {what}, such as {entries[0][0]}: {entries[0][1]}")
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
