"""The map as a picture, by matplotlib, without its global state."""

from __future__ import annotations

import warnings
from pathlib import Path

from ..inspection import Survey
from ..inspection.chart import Chart, Row
from ..printable import printable
from . import caption, palette

#: Inches of one cell, and of what stands around the map.
_CELL = 0.19
_LEFT, _RIGHT, _TOP, _BOTTOM, _LINE = 1.75, 1.75, 0.95, 1.35, 0.19
#: Cells of room between block lists, and from the map to the modules outside of blocks, with the ruler between them.
_GAP, _RULER = 1.6, 2.6
_STEPS = 256
#: Fonts that have what matplotlib's own lacks, on Windows, macOS and Linux: names of files may be Chinese or Japanese.
_FONTS = ("Microsoft YaHei", "Malgun Gothic", "PingFang SC", "Hiragino Sans", "Noto Sans CJK SC", "WenQuanYi Zen Hei")


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
    marks = caption.marks(chart)
    lifted = _LINE * max(0, len(marks) - 1)
    bottom = _BOTTOM - 0.4 * bool(chart.singles) + lifted
    inches = (_LEFT + _RIGHT + width * _CELL, _TOP + bottom + height * _CELL)
    # Text stays text in an SVG; a fixed seed for the names of its parts: the same file gives the same picture.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "qpatch", "hatch.linewidth": 0.6,
                                "hatch.color": ink["hatch"], "font.size": 8,
                                "font.family": _fonts()}), warnings.catch_warnings():
        # A character that no font has is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
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
        _key(figure, chart, theme, inches, lifted)
        _marks(figure, marks, theme, inches, lifted)
        figure.savefig(path, format=form, dpi=160, facecolor=ink["page"], metadata=_undated(form))


def _fonts() -> list[str]:
    from matplotlib.font_manager import fontManager

    installed = set(fontManager.get_font_names())
    return ["DejaVu Sans", *(name for name in _FONTS if name in installed)]


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
        total = len(row.present) + len(row.missing)
        complete = len(row.present) == total
        self._text(self.width + 1.2, top + 0.5, f"{len(row.present)}/{total}", ha="left",
                   color=self.ink["faint" if complete else "text"], weight="normal" if complete else "bold")
        self._text(self.width + 6.9, top + 0.5, caption.share(row, self.chart), ha="right")

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
            if cell.beyond:
                self._text(left + 0.5, top + 0.5, "+", ha="center", weight="bold", color=self.ink["page"])

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
    figure.text(left, 1 - 0.24 * line, _plain(chart.name), fontsize=12, weight="bold", color=ink["text"], va="center")
    figure.text(left, 1 - 0.50 * line, caption.headline(survey, chart), fontsize=8.5, color=ink["faint"], va="center")


def _plain(text: str) -> str:
    """``text`` without its meaning to matplotlib, which sets what is between dollars as a formula."""
    return printable(text).replace("$", r"\$")


def _key(figure, chart, theme, inches, lifted: float) -> None:
    """The ramp with its numbers. ``lifted``: inches from where it stands with one line below it."""
    from matplotlib.colors import ListedColormap

    ink = palette.INK[theme]
    axes = figure.add_axes((_LEFT / inches[0], (0.42 + lifted) / inches[1], 2.6 / inches[0], 0.13 / inches[1]))
    axes.imshow([list(range(_STEPS))], aspect="auto", cmap=ListedColormap(palette.ramp(theme, _STEPS)),
                extent=(0, 100, 0, 1))
    axes.set(yticks=[], xticks=[0, 25, 50, 75, 100])
    axes.set_xticklabels(["0", "25", "50", "75", "100 %"])
    axes.tick_params(colors=ink["faint"], labelsize=7, length=2, width=0.5)
    axes.spines[:].set_visible(False)
    axes.text(0, 1.7, caption.meaning(chart), fontsize=7.5, color=ink["text"], va="bottom")
    axes.text(112, 0.5, caption.scale(chart), fontsize=7.5, color=ink["faint"], va="center")


def _marks(figure, marks, theme, inches, lifted: float) -> None:
    """What cells without a colour mean, a line each, right of the ramp's numbers."""
    from matplotlib.patches import Rectangle

    ink = palette.INK[theme]
    left, size = _LEFT + 2.9, 0.15
    for number, (mark, meaning) in enumerate(marks):
        bottom = 0.18 + lifted - number * _LINE
        colour, hatch = (ink["hatch" if mark == "?" else "text"], "") if mark else ("none", "/////")
        figure.add_artist(Rectangle((left / inches[0], bottom / inches[1]), size / inches[0], size / inches[1],
                                    facecolor=colour, edgecolor=ink["hatch"], hatch=hatch, linewidth=0))
        middle = (bottom + size / 2) / inches[1]
        figure.text((left + size / 2) / inches[0], middle, mark, fontsize=7, ha="center", va="center",
                    color=ink["text" if mark == "?" else "page"])
        figure.text((left + 0.24) / inches[0], middle, meaning, fontsize=7.5, color=ink["faint"], va="center")
