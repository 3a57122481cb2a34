"""Which known failures a log shows, and what it shows of qpatch itself."""

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from . import log_stream, log_text
from .log_messages import Messages
from .log_text import Line

#: Errors that are kept of those that no signature knows, the last ones; they are all counted.
KEPT = 100

_OURS = re.compile(r"\bqpatch: ")
#: A hook's own line -> the state that it tells of.
_STATES = (
    (re.compile(r"qpatch: (\S+) applied to "), "applied"),
    (re.compile(r"qpatch: (\S+) incompatible for (.*)"), "incompatible"),
    (re.compile(r"qpatch: (\S+) failed on (.*)"), "failed"),
)


@dataclass
class Finding:
    """One failure: its signature, the first line that shows it, how often, and what fills the gaps of its words."""

    signature: object
    line: Line
    words: tuple[str, ...]
    count: int = 1
    certain: bool = True

    @property
    def happened(self) -> str:
        return self.signature.happened.format(*self.words)


@dataclass
class Reading:
    """``findings`` in the order of the log. ``unknown``: the last errors that no signature knows, of ``unknowns``.

    ``active``: whether qpatch speaks in it. ``states``: hook -> (state, the line behind it), as the log tells them.
    """

    lines: int = 0
    findings: list[Finding] = field(default_factory=list)
    unknown: deque[Line] = field(default_factory=lambda: deque(maxlen=KEPT))
    unknowns: int = 0
    active: bool = False
    states: dict[str, tuple[str, str]] = field(default_factory=dict)


def read(log: str | Iterable[str], signatures: Sequence) -> Reading:
    """Look for ``signatures`` (see hooks/signatures) in the text of a log, or in its lines one after the other."""
    if isinstance(log, str):
        log = log_stream.split(log)
    reading, line = Reading(), None
    for (line, candidates), following in log_text.with_following(Messages(signatures).over(log_text.lines(log))):
        if "qpatch: " in line.text:
            _note_ours(reading, line)
        others = [other for other, _ in following] if candidates else []
        finding = _match(line, others, candidates)
        if finding is not None and not log_text.announces(line, others):
            _keep(reading, finding)
        elif finding is None and log_text.is_error(line):
            reading.unknowns += 1
            reading.unknown.append(line)
    reading.lines = 0 if line is None else line.number
    _drop_doubtful(reading)
    return reading


def _note_ours(reading: Reading, line: Line) -> None:
    if not _OURS.search(line.text):
        return
    reading.active = True
    for pattern, state in _STATES:
        match = pattern.search(line.text)
        if match:
            reading.states[match.group(1)] = state, line.text


def _match(line: Line, following, candidates) -> Finding | None:
    """The first signature that knows ``line``; where only its message fits, not its frames, it is not certain."""
    doubtful = None
    for signature, match in candidates:
        words = tuple(group or "" for group in match.groups())
        words = tuple(word for word in words if word) or words
        if not signature.frames:
            return Finding(signature, line, words)
        frames = line.frames or log_text.behind(following)
        if re.search(signature.frames, frames):
            return Finding(signature, line, words)
        # A bare message is a guess; a traceback of somebody else is none. What any assertion says is no guess either.
        if not frames and doubtful is None and not signature.message.startswith("^"):
            doubtful = Finding(signature, line, words, certain=False)
    return doubtful


def _keep(reading: Reading, finding: Finding) -> None:
    for known in reading.findings:
        if known.signature is finding.signature and known.certain == finding.certain:
            known.count += 1
            return
    reading.findings.append(finding)


def _drop_doubtful(reading: Reading) -> None:
    """A message that stands without its traceback is not counted where the same log has it with one."""
    certain = {finding.signature.message for finding in reading.findings if finding.certain}
    reading.findings = [finding for finding in reading.findings
                        if finding.certain or finding.signature.message not in certain]
