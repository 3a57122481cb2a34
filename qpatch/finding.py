"""What a hook found when it looked at its target."""

from dataclasses import dataclass

NEEDED, NOT_NEEDED, INCOMPATIBLE = "needed", "not-needed", "incompatible"


@dataclass(frozen=True)
class Finding:
    """A verdict (one of the three constants of this module) and its reason in plain words."""

    verdict: str
    reason: str


def needed(reason: str) -> Finding:
    """The target has the fault, and the hook knows how to mend it."""
    return Finding(NEEDED, reason)


def not_needed(reason: str) -> Finding:
    """The target already behaves."""
    return Finding(NOT_NEEDED, reason)


def incompatible(reason: str) -> Finding:
    """The target is not of a shape that the hook knows: it is left alone."""
    return Finding(INCOMPATIBLE, reason)
