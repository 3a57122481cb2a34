"""What a composition did, file by file: layers applied, layers missed and why, how much of the file took effect."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from .errors import LoraError
from .printable import printable

log = logging.getLogger("qpatch.lora")

#: Lines of one kind that a report shows of one file before it only counts them.
SHOWN = 20


@dataclass(slots=True)
class Applied:
    """One layer of LoRA number ``lora`` that went into a module.

    ``rank`` is None where nothing low-rank was made of it; ``scale`` is alpha/rank and the like, without the strength.
    ``error`` is the relative error ||change - applied|| / ||change|| of a truncation, ``kept`` the share of the
    change that survived the rounding of a coarse weight (its projection on the change wanted).
    """

    lora: int
    module: str
    source: str
    rank: int | None
    scale: float
    error: float = 0.0
    kept: float = 1.0
    note: str = ""

    def text(self, strength: float) -> str:
        facts = [f"rank {self.rank}"] if self.rank is not None else []
        facts.append(f"scale {self.scale * strength:.4g}")
        if self.error:
            facts.append(f"truncation error {self.error:.2%}")
        if abs(self.kept - 1) > 0.005:
            facts.append(f"{self.kept:.0%} kept by the weight's format")
        if self.note:
            facts.append(self.note)
        return f"[APPLY] {self.module} <- {self.source} ({', '.join(facts)})"


@dataclass
class FileReport:
    """One LoRA of a stack.

    ``applied``  layers that took effect, of ``total`` in the file (text encoder layers not counted).
    ``lines``    one :class:`Applied` for each place they went to.
    ``misses``   (key or layer, reason) of everything that did not take effect.
    ``share``    part of the sum of all layers' delta norms that took effect, 0 to 1; None where it was not measured.
    ``problem``  why the whole file was left out, or None; ``error`` is the exception that says so.
    """

    name: str
    strength: float
    total: int = 0
    applied: int = 0
    lines: list[Applied] = field(default_factory=list)
    misses: list[tuple[str, str]] = field(default_factory=list)
    share: float | None = None
    error: LoraError | None = None
    seconds: float = 0.0

    @property
    def problem(self) -> str | None:
        return None if self.error is None else str(self.error)

    def summary(self) -> str:
        if self.problem is not None:
            return f"{self.name}: not applied: {self.problem}"
        text = f"{self.name} at {self.strength:g}: {self.applied} of {self.total} layers applied"
        if self.share is not None:
            text += f", {_percent(self.share)} of the delta norm"
        if self.seconds:
            text += f", {self.seconds:.2f} s"
        return text

    def __str__(self):
        rows = [self.summary()]
        rows += _shown([line.text(self.strength) for line in self.lines], "layers more")
        rows += _shown([f"[MISS] {key}: {reason}" for key, reason in self.misses], "keys more")
        return "\n  ".join(rows)


@dataclass
class Report:
    """What happened: ``files`` in the order of the stack, ``seconds`` for all.

    ``computed`` is False when only scales were rewritten, or what had been set aside was put back.
    """

    files: list[FileReport] = field(default_factory=list)
    seconds: float = 0.0
    computed: bool = True

    @property
    def complete(self) -> bool:
        """Whether every layer of every file took effect in full."""
        return all(file.problem is None and not file.misses for file in self.files)

    def __str__(self):
        if not self.files:
            return "no LoRA"
        return "\n".join(str(file) for file in self.files)

    def write_log(self) -> None:
        """One summary per file at INFO, its misses at WARNING, single layers at DEBUG."""
        for file in self.files:
            log.log(logging.WARNING if file.problem else logging.INFO, "%s", file.summary())
            for line in file.lines:
                log.debug("%s", line.text(file.strength))
            for text in _shown([f"[MISS] {key}: {reason}" for key, reason in file.misses], "keys more"):
                log.warning("%s", text)


def _percent(share: float) -> str:
    # What is not all must not read as all.
    return "100 %" if share >= 1 else f"{min(share * 100, 99.9):.1f} %"


def _shown(rows: list[str], what: str) -> list[str]:
    rows = [printable(row) for row in rows]
    return rows if len(rows) <= SHOWN else [*rows[:SHOWN], f"... and {len(rows) - SHOWN} {what}"]
