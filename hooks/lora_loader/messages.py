"""What the user reads: one line for each LoRA, its misses grouped by reason, and ComfyUI's progress bar."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict

from qpatch import log

#: Keys shown of those that share a reason.
_SAMPLES = 3


def tell(report) -> None:
    """One line for each file that was composed, and one for each reason why keys of it have no effect."""
    for file in report.files:
        log.info(f"{file.name} {file.strength:g} -> {file.applied}/{file.total} layers")
        for reason, keys in _by_reason(file.misses).items():
            more = f" and {len(keys) - _SAMPLES} more" if len(keys) > _SAMPLES else ""
            log.warning(f"{file.name}: {len(keys)} keys without effect, {reason}: {', '.join(keys[:_SAMPLES])}{more}")


def _by_reason(misses) -> dict[str, list[str]]:
    grouped = defaultdict(list)
    for key, reason in misses:
        grouped[reason].append(key)
    return grouped


def refused(error) -> None:
    """A LoRA as a whole has no effect; the workflow goes on without it."""
    log.warning(f"{error}; it has no effect, the others are applied")


@contextlib.contextmanager
def progress():
    """A callable (done, total) that moves ComfyUI's progress bar, or None outside of ComfyUI."""
    utils = sys.modules.get("comfy.utils")
    if not hasattr(utils, "ProgressBar"):
        yield None
        return
    bar = None

    def move(done: int, total: int) -> None:
        nonlocal bar
        bar = bar or utils.ProgressBar(total)
        bar.update_absolute(done, total)

    yield move
