"""LoRAs on the command line: ``PATH``, ``PATH:STRENGTH``, and stacks ``PATH:0.8+PATH:0.5``."""

import math
import os

from .errors import CliError


def with_strength(text: str) -> tuple[str, float]:
    """(path, strength) of ``PATH`` or ``PATH:STRENGTH``; a Windows path's own colon is no strength.

    Only what follows the last colon, and only if it is a number; a file that is called like that wins.
    """
    path, colon, tail = text.rpartition(":")
    if not colon or not path or os.path.exists(text):
        return text, 1.0
    try:
        strength = float(tail)
    except ValueError:
        return text, 1.0
    if not math.isfinite(strength):
        raise CliError(f"{text}: the strength is not a finite number", code=2)
    return path, strength


def stack(text: str) -> list[tuple[str, float]]:
    """(path, strength) of each LoRA in ``A:0.8+B:0.5``; a plus sign that belongs to a file's name is left in it."""
    found, pieces = [], text.split("+")
    while pieces:
        taken = next((count for count in range(len(pieces), 0, -1)
                      if os.path.exists(with_strength("+".join(pieces[:count]))[0])), 1)
        found.append(with_strength("+".join(pieces[:taken])))
        pieces = pieces[taken:]
    return found


def opened(pairs, **how):
    """The files of (path, strength) pairs, opened, with their strengths."""
    from ..lora.files import open_lora

    return [(open_lora(path, **how), strength) for path, strength in pairs]
