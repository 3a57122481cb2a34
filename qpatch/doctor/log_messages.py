"""The messages of all signatures, looked for in all lines of a log."""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from .log_literals import literals
from .log_text import Line

#: Lines that are looked through at a time.
_BATCH = 500
#: Characters of a literal that is worth looking for; shorter ones stand in every other line.
_SHORTEST = 4


class Messages:
    """A line is searched only for the messages of which it has a literal, and most batches of lines have none at all.

    Literals are looked for in a whole batch at once, which takes a tenth of the time of a regex on each of its lines.
    """

    def __init__(self, signatures: Sequence):
        self._searches = [(signature, re.compile(signature.message)) for signature in signatures]
        self._always: set[int] = set()
        self._by_literal: dict[str, set[int]] = {}
        for number, (_, regex) in enumerate(self._searches):
            found = literals(regex)
            if min(map(len, found), default=0) < _SHORTEST:
                self._always.add(number)
                continue
            for literal in found:
                self._by_literal.setdefault(literal, set()).add(number)

    def over(self, lines: Iterable[Line]) -> Iterator[tuple[Line, list]]:
        """Each line with (signature, what its message has found) for those that it shows, in the signatures' order."""
        lines = iter(lines)
        while batch := list(itertools.islice(lines, _BATCH)):
            together = "\n".join([line.text for line in batch])
            here = [(literal, numbers) for literal, numbers in self._by_literal.items() if literal in together]
            for line in batch:
                yield line, self._candidates(line.text, here)

    def _candidates(self, text: str, here) -> list:
        numbers = self._always
        if here:
            numbers = numbers.union(*[those for literal, those in here if literal in text])
        if not numbers:
            return []
        return [(signature, match) for signature, regex in map(self._searches.__getitem__, sorted(numbers))
                if (match := regex.search(text)) and (signature.holds is None or signature.holds(match))]
