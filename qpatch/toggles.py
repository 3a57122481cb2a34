"""The environment variables that switch qpatch, read when a target is met and when asked.

``QPATCH=0``            nothing at all (read in ``activate`` itself, before anything is loaded)
``QPATCH_DISABLE=a,b``  these hooks stay off
``QPATCH_ENABLE=a``     hooks that are off by default are on
``QPATCH_LOG``          debug | info | warning | quiet (default info)
``QPATCH_STRICT=1``     errors inside hooks propagate, for CI
"""

import os

from .catalogue import HOOKS, POSITIVE, Hook

LOG_LEVELS = {"debug": 10, "info": 20, "warning": 30, "quiet": 100}
OFF, ON = ("0", "off", "false", "no"), ("1", "on", "true", "yes")
_FLAGS = ("QPATCH", "QPATCH_STRICT")
_LISTS = ("QPATCH_DISABLE", "QPATCH_ENABLE")


def _flag(name: str) -> str:
    return os.environ.get(name, "").strip().lower()


def _names(variable: str) -> list[str]:
    return [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]


def off() -> bool:
    """Whether ``QPATCH`` switches everything off."""
    return _flag("QPATCH") in OFF


def strict() -> bool:
    """Whether an error inside a hook is to propagate."""
    return _flag("QPATCH_STRICT") in ON


def log_level() -> int:
    """The level of ``QPATCH_LOG`` as a ``logging`` number; INFO if unset or unknown."""
    return LOG_LEVELS.get(_flag("QPATCH_LOG") or "info", LOG_LEVELS["info"])


def log_level_given() -> bool:
    """Whether ``QPATCH_LOG`` names a level, so that what it asks for is to be seen."""
    return _flag("QPATCH_LOG") in LOG_LEVELS


def why_disabled(hook: Hook) -> str | None:
    """The toggle that keeps ``hook`` off, in words; None if it is on."""
    if hook.internal:
        return None
    if hook.name in _names("QPATCH_DISABLE"):
        return "QPATCH_DISABLE names it"
    if not hook.default and hook.name not in _names("QPATCH_ENABLE"):
        return f"off by default; QPATCH_ENABLE={hook.name} turns it on"
    return None


def complaints() -> list[str]:
    """One line for each value that qpatch does not understand, with the nearest it knows."""
    hooks = [hook.name for hook in HOOKS if not hook.internal]
    found = [
        f"{variable}: there is no hook '{name}'{_nearest(name, hooks)}"
        for variable in _LISTS for name in _names(variable) if name not in hooks
    ]
    level = _flag("QPATCH_LOG")
    if level and level not in LOG_LEVELS:
        found.append(f"QPATCH_LOG: '{level}' is not a level{_nearest(level, list(LOG_LEVELS))}")
    for variable in _FLAGS:
        if _flag(variable) and _flag(variable) not in OFF + ON:
            found.append(f"{variable}: '{_flag(variable)}' is neither {'|'.join(ON)} nor {'|'.join(OFF)}")
    return found + _unknown_values() + _unknown_variables()


def _unknown_values() -> list[str]:
    found = []
    for name, values in ((name, values) for hook in HOOKS for name, values in hook.variables.items()):
        value = _flag(name)
        if value and values == POSITIVE and not (value.isdecimal() and int(value) > 0):
            found.append(f"{name}: '{value}' is not {POSITIVE}")
        elif value and values != POSITIVE and value not in values:
            found.append(f"{name}: '{value}' is none of its values{_nearest(value, list(values))}")
    return found


def _unknown_variables() -> list[str]:
    known = {*_FLAGS, *_LISTS, "QPATCH_LOG"}.union(*(hook.variables for hook in HOOKS))
    # QPATCH_TEST_*: the test suite's own.
    found = [name for name in os.environ if name.startswith("QPATCH_") and not name.startswith("QPATCH_TEST_")]
    return [f"{name} is not a variable of qpatch{_nearest(name, sorted(known))}" for name in found if name not in known]


def _nearest(word: str, known: list[str]) -> str:
    # Imported here: it is large, and hardly anyone misspells a variable.
    import difflib

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known)}"
