"""What a check of the doctor says."""

from dataclasses import dataclass

SKIPPED, OK, NOTE, WARN, PROBLEM = "skipped", "ok", "note", "warn", "problem"
#: From the least to the most serious.
ORDER = (SKIPPED, OK, NOTE, WARN, PROBLEM)


@dataclass(frozen=True)
class Verdict:
    """``found``: what was found, in plain words. ``todo``: what the person should do, or ""."""

    verdict: str
    found: str
    todo: str = ""


def skipped(why: str) -> Verdict:
    """There is nothing here that the check is about. ``why``: the thing that is missing, in few words."""
    return Verdict(SKIPPED, why)


def ok(found: str) -> Verdict:
    """All is as it should be."""
    return Verdict(OK, found)


def note(found: str, todo: str = "") -> Verdict:
    """Nothing is wrong, but somebody who looks for a fault wants to know it."""
    return Verdict(NOTE, found, todo)


def warn(found: str, todo: str) -> Verdict:
    """It may do harm, or will when something else happens."""
    return Verdict(WARN, found, todo)


def problem(found: str, todo: str) -> Verdict:
    """Something does not work because of this."""
    return Verdict(PROBLEM, found, todo)
