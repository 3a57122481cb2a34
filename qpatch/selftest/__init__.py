"""The selftest: the installed copy, proved in child interpreters on stand-ins, as a user would meet it."""

from dataclasses import dataclass

PROVED, FAILED, NOT_TRIED = "proved", "failed", "not tried"


@dataclass(frozen=True)
class Proof:
    """One line of the result: what was to be shown, how it came out, and what was seen."""

    name: str
    outcome: str
    seen: str
