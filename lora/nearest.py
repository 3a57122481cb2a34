"""Why a key maps nowhere, and which name that exists comes nearest. Costs are bounded for files full of such keys."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from .families import Family, foreign
from .keys import Resolved
from .roles import Role

#: So many different names are compared; files with more unknown ones get the plain reason for the rest.
LIMIT = 64

#: Longer names are none that was misspelled; comparing takes time with the square of the length.
_LONGEST = 200

#: A last component that means an adapter's tensor, but none that is known.
_ADAPTER_WORD = re.compile(r"\.(lora|lokr|hada|oft|boft|ia3|vera|hra)_[^.]*$")
_NUMBER = re.compile(r"(?<=[._])\d+(?=[._])")
_DOTS_OR_UNDERSCORES = re.compile(r"[._]")


class Nearest:
    """Explains the unknown keys of one file. Names that differ only in their numbers are looked at once."""

    def __init__(self, candidates: Iterable[Family]):
        self._flat = {_flatten(name): name for family in candidates for name in family.spellings()}
        self._reasons: dict[tuple[str, Role | None], str] = {}

    def __call__(self, resolved: Resolved) -> str:
        """The reason why a key, as it was ``resolved``, maps nowhere, in words."""
        name = resolved.stem if resolved.role else resolved.key
        pattern = _NUMBER.sub("#", name), resolved.role
        reason = self._reasons.get(pattern)
        if reason is None:
            reason = self._reason(name, resolved.role)
            if len(self._reasons) < LIMIT:
                self._reasons[pattern] = reason
        if "#" not in reason:
            return reason
        number = _NUMBER.search(name)
        return reason.replace("#", number.group() if number else "N", 1)

    def _reason(self, name, role) -> str:
        if role is None or _ADAPTER_WORD.search(name):
            return f"its ending is none that an adapter has{self._suggest(_ADAPTER_WORD.sub('', name))}"
        if role is Role.ia3_weight:
            return "a plain weight: this part of the file is a model, not a LoRA"
        other = foreign.recognise(name)
        if other is not None:
            return f"a layer of {other}"
        return f"no layer has this name{self._suggest(name)}"

    def _suggest(self, name: str) -> str:
        if len(self._reasons) >= LIMIT or len(name) > _LONGEST:
            return ""
        flat = _flatten(_NUMBER.sub("#", name, count=1))
        close = difflib.get_close_matches(flat, self._flat, n=1, cutoff=0.6)
        return f"; nearest: {self._flat[close[0]]}" if close else ""


def _flatten(name: str) -> str:
    return _DOTS_OR_UNDERSCORES.sub("_", name)
