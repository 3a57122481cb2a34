"""The map as plain text, without colour: a digit for each cell."""

from __future__ import annotations

from ..inspection.chart import Cell, Chart, Row

#: Columns: component, rank, blocks that have it, and behind the map the mean change.
_SIDES = (19, 6, 6)
_MEAN = 9
#: So that a third of the strongest is a 3, whatever float32 has made of it.
_ROUNDING = 1e-5


def table(chart: Chart, width: int = 100) -> list[str]:
    """One line for each component: rank, how many blocks have it, a character per block, the mean change.

    Where that is wider than ``width`` the map follows the table.
    """
    columns = sum(depth for _, depth in chart.groups) + len(chart.groups) - 1
    beside = sum(_SIDES) + columns + _MEAN * chart.measured <= width
    lines = [_heading(chart, columns if beside else 0)]
    lines += [_line(chart, row, cells(chart, row) if beside else "") for row in chart.rows]
    lines += [_line(chart, Row(None, [cell]), "", cell.label, columns if beside else 0) for cell in chart.singles]
    if not beside and _SIDES[0] + columns <= width:
        lines += ["", " " * _SIDES[0] + _rulers(chart)]
        lines += [f"{row.label:<{_SIDES[0]}}{cells(chart, row)}".rstrip() for row in chart.rows]
    return lines


def cells(chart: Chart, row: Row) -> str:
    """0 to 9 of the end of the scale, "+" beyond it, "." untouched, "?" not known, "o" not measured, " " no layer."""
    marks, found, start = [_mark(chart, cell) for cell in row.cells], [], 0
    for _, depth in chart.groups:
        found.append("".join(marks[start:start + depth]))
        start += depth
    return " ".join(found)


def _mark(chart: Chart, cell: Cell | None) -> str:
    if cell is None:
        return " "
    if cell.facts is None:
        return "."
    if not chart.measured:
        return "o"
    if cell.beyond:
        return "+"
    return "?" if cell.relative is None else str(min(9, int(cell.relative * 10 + _ROUNDING)))


def _heading(chart: Chart, columns: int) -> str:
    names = "".join(f"{text:<{size}}" for text, size in zip(("component", "rank", "found"), _SIDES))
    return (names + (_rulers(chart) if columns else "") + f"{'change':>{_MEAN}}" * chart.measured).rstrip()


def _rulers(chart: Chart) -> str:
    """Block numbers over the map: "0.........10........20", or the list's initials where it is short."""
    return " ".join(
        "".join(str(start).ljust(10, ".") for start in range(0, depth, 10))[:depth] if depth >= 10
        else "".join(word[0] for word in name.split("_"))[:depth].ljust(depth)
        for name, depth in chart.groups
    )


def _line(chart: Chart, row: Row, marks: str, label: str | None = None, room: int = 0) -> str:
    """``room``: columns of the map, empty here, that a long ``label`` may take."""
    label = label or row.label
    if len(label) >= _SIDES[0] + room:
        label = ".." + label[-(_SIDES[0] - 3):]
    ranks = sorted({cell.facts.rank for cell in row.present if cell.facts.rank is not None})
    rank = "-" if not ranks else str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
    head = (label, rank, f"{len(row.present)}/{len(row.present) + len(row.missing)}")
    line = "".join(f"{text:<{size}}" if len(text) < size else text + " " for text, size in zip(head, _SIDES)) + marks
    if not chart.measured:
        return line.rstrip()
    mean = row.mean_rms()
    return line.ljust(sum(_SIDES) + room) + f"{'-' if mean is None else format(mean, '.1e'):>{_MEAN}}"
