"""What the user reads: one line for each LoRA, and one for each reason why keys of it have no effect."""

from __future__ import annotations

import traceback
from collections import defaultdict

from qpatch import log
from qpatch.lora.printable import printable

#: Keys shown of those that share a reason.
_SAMPLES = 3


def tell(report) -> None:
    """One line for each file of a composition, and its misses."""
    for file in report.files:
        if file.problem is not None:
            log.warning(f"{file.problem}; it has no effect, the others are applied")
            continue
        log.info(f"{file.name} {file.strength:g} -> {file.applied}/{file.total} layers")
        _tell_misses(file.name, file.misses)


def without_layers(file, texts_matter: bool) -> None:
    """A file of which nothing is for the model; ``texts_matter``: also if it is for a text encoder."""
    texts = () if texts_matter else file.text_encoder_keys
    _tell_misses(file.name, [(key, reason) for key, reason in (*file.unknown, *file.skipped) if key not in texts])


def _tell_misses(name: str, misses) -> None:
    for reason, keys in _by_reason(misses).items():
        more = f" and {len(keys) - _SAMPLES} more" if len(keys) > _SAMPLES else ""
        samples = ", ".join(map(printable, keys[:_SAMPLES]))
        log.warning(f"{name}: {len(keys)} keys without effect, {reason}: {samples}{more}")


def _by_reason(misses) -> dict[str, list[str]]:
    grouped = defaultdict(list)
    for key, reason in misses:
        grouped[reason].append(key)
    return grouped


def refused(error) -> None:
    """A LoRA as a whole has no effect; the workflow goes on without it."""
    log.warning(f"{error}; it has no effect, the model runs without it")


def failed(wanted) -> None:
    """Called from an except clause: a fault of qpatch itself."""
    names = ", ".join(one.name for one, _ in wanted)
    log.warning(f"composing {names} failed, the model runs without: {traceback.format_exc().strip()}")
