"""The map as one self-contained HTML file: no script, no network, light and dark as the browser is set.

Every text of the file under inspection (names, metadata) is escaped, and the page's own policy forbids
whatever is not in it.
"""

from __future__ import annotations

import html

from ..inspection import Survey
from ..inspection.chart import Cell, Chart, Row
from ..inspection.metadata import TAGS_SHOWN
from ..printable import printable
from . import caption, palette
from .style import STYLE

STEPS = 64
#: The look of the box that stands for a mark in the key.
_BOXES = {"": "none", "?": "some", "+": f"c{STEPS - 1} beyond"}


def escape(text: str) -> str:
    """``text`` as content or attribute of the page."""
    return html.escape(printable(text), quote=True)


def page(survey: Survey, chart: Chart) -> str:
    """The document. Hovering over a cell shows its values; the table below lists all of them."""
    title = escape(chart.name)
    return "\n".join([
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">""",
        f"<title>{title}: what this LoRA changes</title>\n<style>\n{_colours()}\n{STYLE}</style>\n</head>\n<body>",
        f"<h1>{title}</h1>\n<p class=\"head\">{escape(caption.headline(survey, chart))}</p>",
        _map(chart), _key(chart), _about(survey), _table(chart),
        "</body>\n</html>\n",
    ])


def _colours() -> str:
    """Custom properties of both themes, and a class for each step of the ramp."""
    themes = []
    for theme in palette.THEMES:
        values = [f"--{name}:{colour}" for name, colour in palette.INK[theme].items()]
        values += [f"--c{step}:{colour}" for step, colour in enumerate(palette.ramp(theme, STEPS))]
        themes.append(":root{color-scheme:" + theme + ";" + ";".join(values) + "}")
    classes = "".join(f".c{step}{{background:var(--c{step})}}" for step in range(STEPS))
    return f"{themes[0]}\n@media (prefers-color-scheme: dark){{{themes[1]}}}\n{classes}"


def _map(chart: Chart) -> str:
    head = "".join(_ruler(name, depth, number) for number, (name, depth) in enumerate(chart.groups))
    names = "".join(f'<th class="list{" gap" if number else ""}" colspan="{depth + bool(number)}" scope="colgroup">'
                    f"{escape(name)}</th>" for number, (name, depth) in enumerate(chart.groups))
    labelled = [(row, row.label) for row in chart.rows] + [(Row(None, [cell]), cell.label) for cell in chart.singles]
    # Values of the lower rows are shown above them: below, the frame that scrolls would cut them off.
    rows = [_row(chart, *row, up=number >= len(labelled) / 2) for number, row in enumerate(labelled)]
    meaning = escape(caption.meaning(chart).capitalize())
    return (f'<p class="meaning" id="meaning">{meaning}</p>\n'
            '<div class="scroll around"><table class="map" aria-describedby="meaning">\n'
            f"<thead><tr><th></th>{names}<th colspan=\"2\"></th></tr>\n"
            f'<tr class="ruler"><th></th>{head}<th scope="col">changed</th><th scope="col">mean</th></tr></thead>\n'
            "<tbody>\n" + "\n".join(rows) + "\n</tbody></table></div>")


def _ruler(name: str, depth: int, number: int) -> str:
    gap = "<td></td>" if number else ""
    return gap + "".join(f"<td>{index if index % 5 == 0 or depth < 5 else ''}</td>" for index in range(depth))


def _row(chart: Chart, row: Row, label: str, up: bool) -> str:
    cells, found = iter(row.cells), []
    columns = sum(depth for _, depth in chart.groups)
    for number, (_, depth) in enumerate(chart.groups):
        found += ["<td></td>"] if number else []
        for _ in range(depth):
            cell = next(cells, None)
            found.append("<td></td>" if cell is None else _cell(chart, cell, up, right=len(found) > columns / 2))
    total = len(row.present) + len(row.missing)
    share = caption.share(row, chart).replace(" ", "&nbsp;")
    count = f"{len(row.present)}/{total}"
    count = count if len(row.present) == total else f"<b>{count}</b>"
    return (f'<tr><th scope="row">{escape(label)}</th>{"".join(found)}'
            f'<td class="count">{count}</td><td class="mean">{share}</td></tr>')


def _cell(chart: Chart, cell: Cell, up: bool, right: bool) -> str:
    if cell.facts is None:
        look = "none"
    elif cell.relative is None:
        look = "some" if chart.measured else f"c{STEPS // 2}"
    else:
        look = f"c{palette.step_of(cell.relative, STEPS)}"
    mark = "?" if look == "some" else "+" if cell.beyond else ""
    look += " beyond" * cell.beyond + " up" * up + " right" * right
    return f'<td class="{look}" data-tip="{_tip(cell)}">{mark}</td>'


def _tip(cell: Cell) -> str:
    return "\n".join(map(escape, [cell.name, *(": ".join(pair) for pair in _values(cell))]))


def _values(cell: Cell) -> list[tuple[str, str]]:
    """(name, value) of everything that is known about a cell."""
    facts = cell.facts
    if facts is None:
        return [("not in the file", "unchanged")]
    found = [("adapter", facts.kind + (" with DoRA" if facts.dora else ""))]
    numbers = (("rank", facts.rank), ("alpha", facts.alpha), ("scale", facts.scale))
    found += [(name, f"{value:g}") for name, value in numbers if value is not None]
    if cell.rms is not None:
        found += [("rms", f"{cell.rms:.3e}"), ("norm", f"{cell.norm:.4g}")]
        found.append(("relative", f"{100 * cell.relative:.1f} %"))
    return found + ([("note", facts.note)] if facts.note else [])


def _key(chart: Chart) -> str:
    swatch = "".join(f'<i class="c{step}"></i>' for step in range(STEPS))
    parts = [f'<span>0</span><span class="ramp">{swatch}</span><span>100&nbsp;%</span>'] if chart.end else []
    parts += [f'<span class="box {_BOXES[mark]}">{mark}</span><span>{escape(meaning)}</span>'
              for mark, meaning in caption.marks(chart)]
    return f'<p class="key">{"".join(parts)}</p>\n<p class="faint">{escape(caption.scale(chart))}</p>'


def _about(survey: Survey) -> str:
    rows = [("made by", f"{survey.maker.name} ({'' if survey.maker.sure else 'guessed: '}{survey.maker.why})")]
    rows += [("triggers", trigger) for trigger in survey.about.triggers]
    if survey.about.tags:
        rows.append(("tags", ", ".join(f"{tag} ({count})" for tag, count in survey.about.tags[:TAGS_SHOWN])))
    rows += list(survey.about.facts.items())
    rows += [("note", note) for note in caption.notes(survey)] + [("refused", problem) for problem in survey.problems]
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows) + "</dl>"


def _table(chart: Chart) -> str:
    """Every layer of the file with its numbers, as text."""
    head = ("layer", "adapter", "rank", "alpha", "scale", "rms", "norm", "relative", "note")
    rows = []
    for cell in chart.cells:
        if cell.facts is not None:
            values = {"layer": cell.name, **dict(_values(cell))}
            rows.append("<tr>" + "".join(f"<td>{escape(values.get(name, ''))}</td>" for name in head) + "</tr>")
    missing = [cell.name for cell in chart.cells if cell.facts is None]
    names = "".join(f'<th scope="col">{name}</th>' for name in head)
    table = f'<table class="all"><thead><tr>{names}</tr></thead><tbody>\n' + "\n".join(rows) + "\n</tbody></table>"
    layers = "layer" if len(rows) == 1 else "layers"
    found = _folded(f"All {len(rows)} {layers} of the file as a table", f'<div class="scroll">{table}</div>')
    if missing:
        found += "\n" + _folded(f"{len(missing)} layers are not in the file", f"<p>{escape(', '.join(missing))}</p>")
    return found


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>\n{content}</details>"
