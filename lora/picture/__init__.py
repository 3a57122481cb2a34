"""Pictures of what a LoRA changes: a map of components and blocks as PNG, SVG, self-contained HTML or text."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from .. import publish
from ..inspection import Survey
from ..inspection.chart import chart
from ..printable import printable

FORMATS = (".png", ".svg", ".html", ".txt")


def draw(survey: Survey, out: str | os.PathLike, *, theme: str = "light", force: bool = False) -> Path:
    """Draw the map of a measured ``survey`` into ``out``, by its suffix; returns the path.

    ``theme``: "light" or "dark", for .png and .svg; an .html follows the browser. Nothing is left behind if it
    fails, and an existing file is only replaced with ``force``. Raises ``ValueError`` for another suffix or where there
    is nothing to draw, ``FileExistsError``, and ``ModuleNotFoundError`` without matplotlib.
    """
    out = Path(out)
    suffix = check(out, [survey.path], force)
    if survey.family is None:
        raise ValueError("the file holds a text encoder's keys only: there is nothing to draw")
    drawn = chart(survey)
    return publish.publish(out, lambda temporary: _write(suffix, survey, drawn, temporary, theme), inputs=[survey.path],
                   force=force)


def check(out: str | os.PathLike, inputs: Sequence[str | os.PathLike] = (), force: bool = False) -> str:
    """The suffix of ``out``. Raises as :func:`draw` does where nothing can be drawn there: ask before measuring."""
    suffix = Path(out).suffix.lower()
    if suffix not in FORMATS:
        known = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise ValueError(f"a picture's name ends in {known}, not {suffix or 'nothing'!r}")
    if suffix in (".png", ".svg") and importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(f"a {suffix} needs matplotlib: pip install matplotlib; an .html needs nothing")
    publish.check(out, inputs, force)
    return suffix


def _write(suffix, survey, drawn, path, theme) -> None:
    # One module for each kind: only the pictures need matplotlib.
    if suffix == ".html":
        from .page import page

        path.write_text(page(survey, drawn), encoding="utf-8")
    elif suffix == ".txt":
        from .text import table

        path.write_text("\n".join([printable(drawn.name), "", *table(drawn)]) + "\n", encoding="utf-8")
    else:
        from .figure import save

        save(survey, drawn, path, suffix[1:], theme)
