"""A log of ComfyUI as plain lines, whatever it went through: colours, time stamps, levels, containers."""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_STAMP = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_LEVEL = r"(?:DEBUG|DETAIL|INFO|WARN|WARNING|ERROR|CRITICAL)"

#: What stands in front of a message, taken off again and again: as the desktop app, ComfyUI-Manager, ComfyUI's own
#: files, ``logging.basicConfig``, docker compose, journald and web pages put it there. One blank goes with it, so that
#: the indentation of a traceback stays.
_FRONTS = re.compile("(?:" + "|".join((
    rf"\[{_STAMP}\] ?",
    rf"\[{_LEVEL}\] {{0,2}}",
    rf"{_STAMP} - (?:\S+ - )?{_LEVEL} - ",
    rf"{_STAMP} ",
    r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ \S+?\[\d+\]: ",
    r"[\w.-]+ +\| ",
    r"> ?",
)) + ")*", re.IGNORECASE)

_FRAME = re.compile(r'^\s*File "(.+?)", line \d+, in \S+')
_ANNOUNCED = "!!! Exception during processing !!! "
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Warning|Exit)\b(?:: .*)?$")

#: Lines behind a message without a traceback above it in which its stack may stand (as in ComfyUI's error report).
_BEHIND = 80
#: Lines of a traceback that are kept, its end.
_DEEPEST = 400


_T = TypeVar("_T")


class Line(NamedTuple):
    """``number`` in the file, from 1; ``text`` without its front; ``frames``: the traceback that it ends, or ""."""

    number: int
    text: str
    frames: str = ""


def lines(texts: Iterable[str]) -> Iterator[Line]:
    """The lines of a log; that which ends a traceback has its frames with it."""
    block: deque[str] = deque(maxlen=_DEEPEST)
    for number, text in enumerate(map(_plain, texts), start=1):
        if text[:1].isspace() or text.startswith("Traceback (most recent"):
            block.append(text)
            yield Line(number, text)
            continue
        yield Line(number, text, _frames(block) if block and text else "")
        block.clear()


def with_following(found: Iterable[_T]) -> Iterator[tuple[_T, deque[_T]]]:
    """Each line (and whatever stands with it) with those that follow it, as many as :func:`behind` looks at."""
    window: deque[_T] = deque()
    for line in found:
        window.append(line)
        if len(window) > _BEHIND:
            yield window.popleft(), window
    while window:
        yield window.popleft(), window


def behind(following: Iterable[Line]) -> str:
    """The frames that stand behind a line, for a report that names the error first."""
    return "\n".join(line.text for line in following if _FRAME.match(line.text) or line.text.startswith("    "))


def is_error(line: Line) -> bool:
    """Whether the line ends a traceback with an error."""
    return bool(line.frames) and bool(_ERROR.match(line.text))


def announces(line: Line, following: Iterable[Line]) -> bool:
    """Whether the line only says what a traceback behind it says too, as ComfyUI does it."""
    _, announced, message = line.text.partition(_ANNOUNCED)
    return bool(announced) and any(other.frames and message.strip() in other.text for other in following)


def _plain(text: str) -> str:
    if "\x1b" in text:
        text = _COLOURS.sub("", text)
    return text[_FRONTS.match(text).end():].rstrip()


def _frames(block: Iterable[str]) -> str:
    """The block of lines as a traceback, or "" if it is none."""
    return "\n".join(block) if any(_FRAME.match(line) for line in block) else ""
