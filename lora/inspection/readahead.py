"""The part of a file that is read next is asked for early, so that the disk works while the processor multiplies."""

from __future__ import annotations

from ..source import FileSource

#: Bytes that are asked for before they are read, and bytes that are asked for at a time.
_DISTANCE, _STEP = 32 << 20, 4 << 20


class Readahead:
    """For threads that read ``reader`` nearly in the order of its bytes."""

    def __init__(self, reader: FileSource):
        self._reader, self._asked = reader, 0

    def at(self, position: int) -> None:
        """What begins at ``position`` of the data is read now."""
        while self._asked < position + _DISTANCE:
            # Two threads may ask for the same: the second time nothing happens.
            begin, self._asked = self._asked, self._asked + _STEP
            self._reader.prefetch(begin, begin + _STEP)
