"""A progress bar for what may take over a second: the caller's, ComfyUI's, tqdm's on a terminal, or none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator

#: (steps done, steps in all).
Progress = Callable[[int, int], None]

#: Seconds after which a bar appears: what is quicker shows nothing.
_DELAY = 0.5


class Steps:
    """A bar over ``total`` steps, made when it has something to tell and closed at the end of the with block."""

    def __init__(self, title: str, total: int, progress: Progress | None = None):
        self.title, self.total, self.done = title, total, 0
        self._show, self._close = progress and self._tell(progress), None
        self._began = time.monotonic()

    def _tell(self, progress: Progress):
        return lambda done: progress(done, self.total)

    def __enter__(self) -> Steps:
        self._update()
        return self

    def step(self) -> None:
        """One step is done."""
        self.done += 1
        self._update()

    def _update(self) -> None:
        if self._show is None and self.done < self.total and time.monotonic() - self._began > _DELAY:
            self._show, self._close = _bar(self.title, self.total)
        if self._show is not None:
            self._show(self.done)

    def __exit__(self, *_) -> None:
        if self._close is not None:
            self._close()


def track(items: Iterable, total: int, title: str, progress: Progress | None = None) -> Iterator:
    """Yield ``items``, each a step of a bar."""
    with Steps(title, total, progress) as steps:
        for item in items:
            yield item
            steps.step()


def _bar(title, total):
    """(show the number of steps done, close) of the bar that fits the surroundings."""
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
