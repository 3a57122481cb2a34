"""How one known failure is recognised, and what is said of it."""

from collections.abc import Callable
from dataclasses import dataclass
from re import Match


@dataclass(frozen=True)
class Signature:
    """One failure.

    ``message``   regex, searched in a line of the log; its groups may stand in ``happened`` as {0}, {1}.
    ``frames``    regex that the traceback of the message has to have in it, or "".
    ``happened``  what it means, in plain words.
    ``hooks``     the hooks of qpatch that mend it.
    ``remedy``    what to do where no hook does, or beside them.
    ``holds``     a further condition on what ``message`` has found.
    """

    name: str
    message: str
    happened: str
    frames: str = ""
    hooks: tuple[str, ...] = ()
    remedy: str = ""
    holds: Callable[[Match], bool] | None = None
