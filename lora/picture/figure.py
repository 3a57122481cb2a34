"""The map as a picture, by matplotlib, without its global state."""

from __future__ import annotations

from pathlib import Path

from ..inspection import Survey
from ..inspection.chart import Chart, Row
from . import caption, palette

#: Inches of one cell, and of what stands around the map.
_CELL = 0.19
_LEFT, _RIGHT, _TOP, _BOTTOM = 1.75, 1.75, 0.95, 1.35
#: Cells of room between block lists, and from the map to the modules outside of blocks, with the ruler between them.
_GAP, _RULER = 1.6, 2.6
_STEPS = 256


def save(survey: Survey, chart: Chart, path: Path, form: str, theme: str = "light") -> None:
    """Write the picture to ``path`` as ``form`` ("png" or "svg"). Raises ``ModuleNotFoundError`` without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"a .{form} needs matplotlib ({error}): pip install matplotlib; an .html needs"
                                  " nothing") from error
    ink, columns = palette.INK[theme], _columns(chart)
    width, height = columns[-1][1] + 1, len(chart.rows) + (len(chart.singles) + _RULER if chart.singles else 0)
    bottom = _BOTTOM - 0.4 * bool(chart.singles)
    inches = (_LEFT + _RIGHT + width * _CELL, _TOP + bottom + height * _CELL)
    # Text stays text in an SVG; a fixed seed for the names of its parts: the same file gives the same picture.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "qpatch", "hatch.linewidth": 0.6,
                                "hatch.color": ink["hatch"], "font.size": 8}):
        figure = Figure(figsize=inches, facecolor=ink["page"])
        axes = figure.add_axes((_LEFT / inches[0], bottom / inches[1], width * _CELL / inches[0],
                                height * _CELL / inches[1]))
        axes.set(xlim=(0, width), ylim=(height, 0), facecolor=ink["page"], xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        painter = _Painter(axes, chart, theme, columns, width)
        for number, row in enumerate(chart.rows):
            painter.row(row, number)
        for number, cell in enumerate(chart.singles):
            painter.row(Row(None, [cell]), len(chart.rows) + _RULER + number, cell.label)
        painter.rulers(len(chart.rows))
        _texts(figure, survey, chart, ink, inches)
        _key(figure, chart, theme, inches)
        figure.savefig(path, format=form, dpi=160, facecolor=ink["page"], metadata=_undated(form))


def _undated(form: str) -> dict:
    return {"Date": None} if form == "svg" else {}


def _columns(chart: Chart) -> list[tuple[str, float]]:
    """(block list, left edge) of each column of the map."""
    found, left = [], 0.0
    for number, (name, depth) in enumerate(chart.groups):
        left += _GAP if number else 0
        found += [(name, left + index) for index in range(depth)]
        left += depth
    return found


class _Painter:
    """Draws rows of cells; coordinates are cells, downwards."""

    def __init__(self, axes, chart: Chart, theme: str, columns, width: float):
        self.axes, self.chart, self.columns, self.width = axes, chart, columns, width
        self.ink, self.colours = palette.INK[theme], palette.ramp(theme, _STEPS)

    def row(self, row: Row, top: float, label: str | None = None) -> None:
        for (_, left), cell in zip(self.columns, row.cells):
            if cell is not None:
                self._cell(cell, left, top)
        self._text(-0.6, top + 0.5, label or row.label, ha="right")
        mean = row.mean_rms()
        share = "" if mean is None or not self.chart.strongest else f"{100 * mean / self.chart.strongest.rms:.0f} %"
        total = len(row.present) + len(row.missing)
        complete = len(row.present) == total
        self._text(self.width + 1.2, top + 0.5, f"{len(row.present)}/{total}", ha="left",
                   color=self.ink["faint" if complete else "text"], weight="normal" if complete else "bold")
        self._text(self.width + 6.9, top + 0.5, share, ha="right")

    def _cell(self, cell, left: float, top: float) -> None:
        from matplotlib.patches import Rectangle

        # A sliver of the page between cells, so that single ones can be counted.
        box = {"xy": (left + 0.04, top + 0.04), "width": 0.92, "height": 0.92, "linewidth": 0}
        if cell.facts is None:
            self.axes.add_patch(Rectangle(**box, facecolor="none", edgecolor=self.ink["hatch"], hatch="/////"))
        elif cell.relative is None:
            colour = self.ink["hatch"] if self.chart.measured else self.colours[_STEPS // 2]
            self.axes.add_patch(Rectangle(**box, facecolor=colour))
            if self.chart.measured:
                self._text(left + 0.5, top + 0.5, "?", ha="center", size=6)
        else:
            self.axes.add_patch(Rectangle(**box, facecolor=self.colours[palette.step_of(cell.relative, _STEPS)]))

    def rulers(self, height: float) -> None:
        """Block numbers under the map, the lists' names under them; headings of the columns at its side."""
        start = 0
        for name, depth in self.chart.groups:
            lefts = [left for _, left in self.columns[start:start + depth]]
            for index in range(0, depth, 5 if depth > 5 else 1):
                self._text(lefts[index] + 0.5, height + 0.5, str(index), ha="center", size=7, color=self.ink["faint"])
            if depth > 5:
                self._text(lefts[0], height + 1.5, f"{name} 0 to {depth - 1}", ha="left", color=self.ink["faint"])
            else:
                self._text(lefts[-1] + 1, height + 1.1, name, ha="right", va="top", rotation=35,
                           rotation_mode="anchor", color=self.ink["faint"])
            start += depth
        self._text(self.width + 1.2, -0.6, "changed", ha="left", size=7, color=self.ink["faint"])
        self._text(self.width + 6.9, -0.6, "mean", ha="right", size=7, color=self.ink["faint"])

    def _text(self, left, top, text, *, size=8, va="center", color=None, **how):
        self.axes.text(left, top, text, fontsize=size, va=va, color=color or self.ink["text"], clip_on=False, **how)


def _texts(figure, survey, chart, ink, inches) -> None:
    left, line = 0.2 / inches[0], 1 / inches[1]
    figure.text(left, 1 - 0.24 * line, chart.name, fontsize=12, weight="bold", color=ink["text"], va="center")
    figure.text(left, 1 - 0.50 * line, caption.headline(survey, chart), fontsize=8.5, color=ink["faint"], va="center")


def _key(figure, chart, theme, inches) -> None:
    """The ramp with its numbers, and what is hatched."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Rectangle

    ink = palette.INK[theme]
    left, bottom, width, height = _LEFT / inches[0], 0.42 / inches[1], 2.6 / inches[0], 0.13 / inches[1]
    axes = figure.add_axes((left, bottom, width, height))
    axes.imshow([list(range(_STEPS))], aspect="auto", cmap=ListedColormap(palette.ramp(theme, _STEPS)),
                extent=(0, 100, 0, 1))
    axes.set(yticks=[], xticks=[0, 25, 50, 75, 100])
    axes.set_xticklabels(["0", "25", "50", "75", "100 %"])
    axes.tick_params(colors=ink["faint"], labelsize=7, length=2, width=0.5)
    axes.spines[:].set_visible(False)
    axes.text(0, 1.7, caption.meaning(chart), fontsize=7.5, color=ink["text"], va="bottom")
    axes.text(112, 0.5, caption.strongest(chart), fontsize=7.5, color=ink["faint"], va="center")
    axes.add_patch(Rectangle((112, -1.9), 5, 1.2, facecolor="none", edgecolor=ink["hatch"], hatch="/////", linewidth=0,
                             clip_on=False))
    axes.text(119, -1.3, "not in the file", fontsize=7.5, color=ink["faint"], va="center")
