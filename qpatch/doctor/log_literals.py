"""Which plain texts a regex cannot do without: looking for these first, most lines of a log are done with."""

import re
from collections.abc import Iterator

#: The parts of a regex. What is ``plain`` stands for itself; a ``quantifier`` may take the part before it away.
_PARTS = re.compile(r"""
    \\(?P<escaped>[^A-Za-z0-9])   | \\.
  | \[\^?\]?(?:\\.|[^\]\\])*\]
  | (?P<quantifier>[*+?]|\{\d*,?\d*\})
  | (?P<open>\()                  | (?P<close>\))
  | (?P<otherwise>\|)             | [.^$]
  | (?P<plain>.)
""", re.VERBOSE | re.DOTALL)


def literals(regex: re.Pattern) -> tuple[str, ...]:
    """Texts of which one stands in all that ``regex`` finds; () where no such text can be told.

    Only what is outside of groups is looked at. The longest text of each alternative is taken.
    """
    if regex.flags & (re.IGNORECASE | re.VERBOSE):
        return ()
    longest = [max(runs, key=len) for runs in _alternatives(regex.pattern)]
    return tuple(dict.fromkeys(longest)) if all(longest) else ()


def _alternatives(pattern: str) -> Iterator[list[str]]:
    """For each alternative the runs of plain characters that it has in it."""
    runs, depth = [""], 0
    for part in _PARTS.finditer(pattern):
        kind = part.lastgroup
        depth += (kind == "open") - (kind == "close")
        if depth or kind == "close":
            runs.append("")
        elif kind in ("plain", "escaped"):
            runs[-1] += part[kind]
        elif kind == "otherwise":
            yield runs
            runs = [""]
        else:
            if kind == "quantifier":
                runs[-1] = runs[-1][:-1]
            runs.append("")
    yield runs
