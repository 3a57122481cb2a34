"""Which layers of one file took effect, and how much of it they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import lowrank
from .adapters import Adapter
from .errors import LoraError
from .files import LoraFile
from .keys import Target, split_suffix
from .report import FileReport
from .terms import Delta


@dataclass(eq=False)
class Coverage:
    """Keeps the book of ``file`` while it is placed; writes into ``report``.

    A layer counts as applied if the change of its weight (or of its bias, if it has nothing else) took effect.
    """

    file: LoraFile
    report: FileReport
    _applied: set[Target] = field(default_factory=set)
    _missed: dict[Target, tuple[str, str]] = field(default_factory=dict)
    _notes: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self):
        texts = set(self.file.text_encoder_keys)
        self._lost = [entry for entry in [*self.file.unknown, *self.file.skipped] if entry[0] not in texts]
        self.report.total = len(self.file.layers) + len(self._lost_layers())

    def _lost_layers(self) -> set[str]:
        """Module names, as written, of keys that are in no layer of the file."""
        stems = {_stem(key) for key, _ in self._lost}
        if not stems:
            return set()
        known = {_stem(key) for adapter in self.file.layers.values() for key in adapter.keys.values()}
        return {stem for stem in stems - known if stem}

    def apply(self, target: Target) -> None:
        self._applied.add(target)

    def miss(self, target: Target, key: str, reason: str) -> None:
        """The layer does not take effect."""
        self._missed[target] = (key, reason)

    def note(self, key: str, reason: str) -> None:
        """A part of a layer does not take effect; the rest of it does."""
        self._notes.append((key, reason))

    def settle(self) -> None:
        """Bring the report up to date."""
        effective = self._applied - self._missed.keys()
        self.report.applied = len(effective)
        self.report.misses = [*self._missed.values(), *self._notes, *self._lost]
        self.report.share = self._share(effective) if self.report.misses else 1.0

    def _share(self, effective: set[Target]) -> float | None:
        """Part of the sum of all layers' norms; only measured when something is missing, because it takes time."""
        if not effective:
            return 0.0
        norms = {target: _norm(adapter) for target, adapter in self.file.layers.items()}
        strays = sum(filter(None, map(_norm_of_stray, self.file.strays)))
        total = sum(filter(None, norms.values())) + strays
        return sum(norms[target] or 0.0 for target in effective) / total if total else None


def _stem(key: str) -> str | None:
    split = split_suffix(key)
    return split[0] if split else None


def _norm(adapter: Adapter) -> float | None:
    """Norm of what a layer changes; None where that depends on the base weight."""
    delta: Delta = adapter.delta()
    if delta.rebase is not None or delta.replace is not None:
        return None
    return lowrank.norm(delta.terms if delta.dense is None else delta.dense)


def _norm_of_stray(adapter: Adapter) -> float | None:
    """The same for a layer that goes nowhere; what is wrong with its data does not matter to the others."""
    try:
        return _norm(adapter)
    except LoraError:
        return None
