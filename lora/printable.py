"""Text from a file, made safe to show.

A key or a trigger word may hold anything. A terminal obeys escape sequences, a line end makes one line of a log two,
and direction marks turn what follows around.
"""

from __future__ import annotations

import unicodedata

#: Invisible, but what emoji and several scripts are joined with.
_JOINERS = "\u200c\u200d\ufe0f"

_LONGEST = 200


def printable(text: str) -> str:
    """``text`` with controls, line ends, direction marks and the like written as ``\\x1b``, ``\\n``, ``\\u202e``."""
    return text if text.isprintable() else "".join(map(_shown, text))


def short(text: str, longest: int = _LONGEST) -> str:
    """The same in at most ``longest`` characters, the middle left out."""
    text = printable(text)
    half = (longest - 3) // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"


def _shown(character: str) -> str:
    if character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()
