"""Why a key maps nowhere, and which name that exists comes nearest. Costs are bounded for files full of such keys."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from . import keys
from .families import Family, foreign

#: So many different names are compared; files with more unknown ones get the plain reason for the rest.
LIMIT = 64

_NUMBER = re.compile(r"(?<=[._])\d+(?=[._])")
_DOTS_OR_UNDERSCORES = re.compile(r"[._]")


class Nearest:
    """Explains unknown keys of one file. Names that differ only in their block number are compared once."""

    def __init__(self, candidates: Iterable[Family]):
        spellings = [name for family in candidates for name in family.spellings()]
        self._flat = {_flatten(name): name for name in spellings}
        self._known: dict[str, str | None] = {}

    def __call__(self, key: str) -> str:
        """The reason for ``key``, in words."""
        split = keys.split_suffix(key)
        if split is None:
            return f"its ending is none that an adapter has{self._suggest(key)}"
        if split[1] is keys.Role.ia3_weight:
            return "a plain weight: this part of the file is a model, not a LoRA"
        stem = keys.strip_prefix(split[0])
        other = foreign.recognise(stem)
        if other is not None:
            return f"a layer of {other}"
        return f"no layer has this name{self._suggest(stem)}"

    def _suggest(self, stem: str) -> str:
        number = _NUMBER.search(stem)
        pattern = _NUMBER.sub("#", stem, count=1)
        if pattern not in self._known:
            if len(self._known) >= LIMIT:
                return ""
            close = difflib.get_close_matches(_flatten(pattern), self._flat, n=1, cutoff=0.6)
            self._known[pattern] = self._flat[close[0]] if close else None
        name = self._known[pattern]
        if name is None:
            return ""
        return f"; nearest: {name.replace('#', number.group() if number else 'N', 1)}"


def _flatten(name: str) -> str:
    return _DOTS_OR_UNDERSCORES.sub("_", name)
