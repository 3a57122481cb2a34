"""The lines of a log file of any size and encoding, one after the other: a log of months is not held in memory."""

import codecs
import json
from collections.abc import Callable, Iterator
from typing import BinaryIO

#: Bytes that are read at a time, and characters of a line that are kept: its end, where a progress bar wrote over it.
CHUNK, LONGEST = 1 << 20, 20_000
#: ComfyUI's server gives its last few hundred entries as JSON; what is larger is none of these.
_LARGEST_JSON = 1 << 25

_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


def texts(stream: BinaryIO, step: Callable[[], None] = lambda: None) -> Iterator[str]:
    """The lines in ``stream``; ``step`` is called after each chunk of it.

    UTF-8 or UTF-16, which PowerShell writes, told from the first bytes. What is no text in either is shown with marks.
    """
    first = stream.read(CHUNK)
    if first.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"{"):
        first += stream.read(_LARGEST_JSON)
        text = first.decode("utf-8-sig", errors="replace")
        if entries_of(text) is not None:
            yield from split(text)
            return
    encoding, first = _encoding(first)
    decoder, rest = codecs.getincrementaldecoder(encoding)(errors="replace"), ""
    while first:
        *whole, rest = (rest + decoder.decode(first)).split("\n")
        yield from map(_visible, whole)
        # Without a line end for that long it is a progress bar: each state begins with a carriage return.
        rest = rest[-LONGEST:]
        step()
        first = stream.read(CHUNK)
    rest += decoder.decode(b"", final=True)
    if rest:
        yield _visible(rest)


def split(text: str) -> Iterator[str]:
    """The lines of a text that is in memory, or of the entries of ComfyUI's log in JSON."""
    if text.lstrip().startswith("{"):
        text = entries_of(text) or text
    return map(_visible, text.rstrip("\n").split("\n"))


def entries_of(text: str) -> str | None:
    """The text in ComfyUI's log in JSON, {"entries": [{"m": ...}]}; None if it is not that."""
    try:
        return "".join(entry["m"] for entry in json.loads(text)["entries"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _encoding(first: bytes) -> tuple[str, bytes]:
    for mark, encoding in _MARKS:
        if first.startswith(mark):
            return encoding, first[len(mark):]
    if len(first) > 3 and first[1::2].count(0) > len(first) // 4:
        return "utf-16-le", first
    return "utf-8", first


def _visible(line: str) -> str:
    """What a terminal shows of a line that a progress bar has written over, again and again."""
    return line.removesuffix("\r").rpartition("\r")[2][-LONGEST:]
