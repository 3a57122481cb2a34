"""The environment variables that switch qpatch, read when a target is met and when asked.

``QPATCH=0``            nothing at all (read in ``activate`` itself, before anything is loaded)
``QPATCH_DISABLE=a,b``  these hooks stay off
``QPATCH_ENABLE=a``     hooks that are off by default are on
``QPATCH_LOG``          debug | info | warning | quiet (default info)
``QPATCH_STRICT=1``     errors inside hooks propagate, for CI
"""

import difflib
import os

from .catalogue import HOOKS, Hook

LOG_LEVELS = {"debug": 10, "info": 20, "warning": 30, "quiet": 100}
#: Variables that single hooks read; a hook with one of its own adds it here, for ``complaints``.
OTHER_VARIABLES: set[str] = set()
_KNOWN = {"QPATCH", "QPATCH_DISABLE", "QPATCH_ENABLE", "QPATCH_LOG", "QPATCH_STRICT"}


def _flag(name: str) -> str:
    return os.environ.get(name, "").strip().lower()


def _names(variable: str) -> list[str]:
    return [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]


def off() -> bool:
    """Whether ``QPATCH`` switches everything off."""
    return _flag("QPATCH") in ("0", "off", "false", "no")


def strict() -> bool:
    """Whether an error inside a hook is to propagate."""
    return _flag("QPATCH_STRICT") in ("1", "on", "true", "yes")


def log_level() -> int:
    """The level of ``QPATCH_LOG`` as a ``logging`` number; INFO if unset or unknown."""
    return LOG_LEVELS.get(_flag("QPATCH_LOG") or "info", LOG_LEVELS["info"])


def why_disabled(hook: Hook) -> str | None:
    """The toggle that keeps ``hook`` off, in words; None if it is on."""
    if hook.name in _names("QPATCH_DISABLE"):
        return "QPATCH_DISABLE names it"
    if not hook.default and hook.name not in _names("QPATCH_ENABLE"):
        return f"off by default; QPATCH_ENABLE={hook.name} turns it on"
    return None


def complaints() -> list[str]:
    """One line for each value that qpatch does not understand, with the nearest it knows."""
    found = []
    hooks = [hook.name for hook in HOOKS]
    for variable in ("QPATCH_DISABLE", "QPATCH_ENABLE"):
        for name in _names(variable):
            if name not in hooks:
                found.append(f"{variable}: there is no hook '{name}'{_nearest(name, hooks)}")
    level = _flag("QPATCH_LOG")
    if level and level not in LOG_LEVELS:
        found.append(f"QPATCH_LOG: '{level}' is not a level{_nearest(level, list(LOG_LEVELS))}")
    for variable in os.environ:
        if variable.startswith("QPATCH_") and not variable.startswith("QPATCH_TEST_"):
            if variable not in _KNOWN | OTHER_VARIABLES:
                found.append(f"{variable} is not a variable of qpatch{_nearest(variable, sorted(_KNOWN | OTHER_VARIABLES))}")
    return found


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known)}"
