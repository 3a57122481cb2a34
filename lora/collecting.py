"""Python's garbage collector, off while very many objects are made that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """No search for dead cycles inside: it takes as long as the process has objects, and ComfyUI's has many.

    Opening a file of 100,000 keys spent half its time on it, a change of strengths a third.
    Where threads overlap the collector is on again when the first of them is done; none leaves it off.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
