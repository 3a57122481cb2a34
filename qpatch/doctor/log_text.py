"""A log of ComfyUI as plain lines, whatever it went through: colours, time stamps, levels, containers, JSON."""

import json
import re
from dataclasses import dataclass

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_STAMP = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_LEVEL = r"(?:DEBUG|DETAIL|INFO|WARN|WARNING|ERROR|CRITICAL)"

#: What stands in front of a message, taken off again and again: as the desktop app, ComfyUI-Manager, ComfyUI's own
#: files, ``logging.basicConfig``, docker compose, journald and web pages put it there. One blank goes with it, so that
#: the indentation of a traceback stays.
_FRONTS = [re.compile(pattern, re.IGNORECASE) for pattern in (
    rf"\[{_STAMP}\] ?",
    rf"\[{_LEVEL}\] {{0,2}}",
    rf"{_STAMP} - (?:\S+ - )?{_LEVEL} - ",
    rf"{_STAMP} ",
    r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ \S+?\[\d+\]: ",
    r"[\w.-]+ +\| ",
    r"> ?",
)]

_FRAME = re.compile(r'^\s*File "(.+?)", line \d+, in \S+')
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Warning|Exit)\b(?:: .*)?$")

#: Lines behind a message without a traceback above it in which its stack may stand (as in ComfyUI's error report).
_BEHIND = 80


@dataclass(frozen=True)
class Line:
    """``number`` in the file, from 1; ``text`` without its front; ``frames``: the traceback that it ends, or ""."""

    number: int
    text: str
    frames: str = ""


def lines(raw: str) -> list[Line]:
    """The lines of a log; that which ends a traceback has its frames with it."""
    texts = [_plain(text) for text in _unpacked(raw)]
    found = []
    for number, text in enumerate(texts):
        frames = _above(texts, number) if text and not text[0].isspace() else ""
        found.append(Line(number + 1, text, frames))
    return found


def behind(found: list[Line], line: Line) -> str:
    """The frames that stand behind ``line``, for a report that names the error first."""
    after = [entry.text for entry in found[line.number:line.number + _BEHIND]]
    return "\n".join(text for text in after if _FRAME.match(text) or text.startswith("    "))


def errors(found: list[Line]) -> list[Line]:
    """The lines that end a traceback with an error."""
    return [line for line in found if line.frames and _ERROR.match(line.text)]


def _unpacked(raw: str) -> list[str]:
    """The lines of the text, or of the entries of ComfyUI's log in JSON ({"entries": [{"m": ...}]})."""
    if raw.lstrip().startswith("{"):
        try:
            raw = "".join(entry["m"] for entry in json.loads(raw)["entries"])
        except (ValueError, KeyError, TypeError):
            pass
    # A progress bar is one line that is written over again and again.
    return [text.rpartition("\r")[2] for text in raw.replace("\r\n", "\n").rstrip("\n").split("\n")]


def _plain(text: str) -> str:
    text, stripped = _COLOURS.sub("", text), True
    while stripped:
        stripped = False
        for front in _FRONTS:
            match = front.match(text)
            if match and match.end():
                text, stripped = text[match.end():], True
    return text.rstrip()


def _above(texts: list[str], number: int) -> str:
    """The block of a traceback that ends right above line ``number``."""
    block, position = [], number - 1
    while position >= 0 and (texts[position][:1].isspace() or texts[position].startswith("Traceback (most recent")):
        block.append(texts[position])
        position -= 1
    text = "\n".join(reversed(block))
    return text if any(_FRAME.match(line) for line in block) else ""
