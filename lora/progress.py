"""A progress bar for what may take over a second: the caller's, ComfyUI's, tqdm's on a terminal, or none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator

#: (steps done, steps in all).
Progress = Callable[[int, int], None]

#: Seconds after which a bar appears: what is quicker shows nothing.
_DELAY = 0.5


def track(items: Iterable, total: int, title: str, progress: Progress | None = None) -> Iterator:
    """Yield ``items``, showing how many of ``total`` are done. The bar ends when the loop does, also by an error."""
    show, close = _late(title, total, progress)
    try:
        for done, item in enumerate(items):
            show(done)
            yield item
        show(total)
    finally:
        close()


def _late(title, total, progress):
    """(show, close) of a bar that is only made when it has something to tell."""
    if progress is not None:
        return (lambda done: progress(done, total)), (lambda: None)
    began, bar = time.monotonic(), []

    def show(done):
        if not bar and done < total and time.monotonic() - began > _DELAY:
            bar.append(_bar(title, total))
        if bar:
            bar[0][0](done)

    return show, lambda: bar and bar[0][1]()


def _bar(title, total):
    utils = sys.modules.get("comfy.utils")
    if utils is not None and hasattr(utils, "ProgressBar"):
        bar = utils.ProgressBar(total)
        return (lambda done: bar.update_absolute(done, total)), (lambda: None)
    if not sys.stderr or not sys.stderr.isatty():
        return (lambda done: None), (lambda: None)
    try:
        from tqdm import tqdm
    except ImportError:
        return (lambda done: None), (lambda: None)
    bar = tqdm(total=total, desc=title, leave=False, file=sys.stderr)
    return (lambda done: bar.update(done - bar.n)), bar.close
