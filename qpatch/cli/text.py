"""Plain text for terminals: padded columns, wrapped at the terminal's width, no colour."""

import json
import shutil
import textwrap


def width(fallback: int = 80) -> int:
    """Columns to use: the terminal's, within 60 and 100; ``fallback`` where there is none."""
    return max(60, min(100, shutil.get_terminal_size((fallback, 24)).columns))


def row(cells, sizes, text: str) -> str:
    """One row: ``cells`` padded to ``sizes``, then ``text`` wrapped in the room that is left."""
    head = "".join(f"{cell:<{size}}" for cell, size in zip(cells, sizes))
    return wrap(text, first=head, indent=" " * sum(sizes))


def wrap(text: str, first: str = "", indent: str = "") -> str:
    """``text`` wrapped; paths and names are never broken, so that they can be copied."""
    return "\n".join(textwrap.wrap(text, width(), initial_indent=first, subsequent_indent=indent,
                                   break_long_words=False, break_on_hyphens=False)) or first.rstrip()


def count(number: int, noun: str) -> str:
    """"1 hook", "2 hooks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def print_json(data) -> None:
    """Print ``data`` as JSON; ValueError for NaN and infinities, which JSON does not have."""
    print(json.dumps(data, indent=2, allow_nan=False))
