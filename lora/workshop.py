"""A hidden folder for files in the making. One whose process was killed is removed when the next one is made there."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:
    # Windows: nothing tells there whether a folder is still in use, so none that was left behind is removed.
    fcntl = None

_DIGITS = 16
_NAMES = f".qpatch-{'[0-9a-f]' * _DIGITS}.tmp"


@contextlib.contextmanager
def workshop(parent: Path) -> Iterator[Path]:
    """A folder in ``parent``, gone afterwards; its files are on the same disk, so that they can be moved out of it.

    A folder and not a file: safetensors writes beside the name that it is given, under one of its own.
    Raises ``OSError`` where none can be made.
    """
    for folder in parent.glob(_NAMES):
        _remove_if_left_behind(folder)
    folder, lock = _made(parent)
    try:
        yield folder
    finally:
        # What cannot be removed now is removed by the next call.
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _made(parent: Path) -> tuple[Path, int | None]:
    """A new folder, and the descriptor that holds its lock while this process lives."""
    while True:
        folder = parent / f".qpatch-{secrets.token_hex(_DIGITS // 2)}.tmp"
        try:
            # On Windows a folder of the owner's only would hand its restrictions on to the files that leave it.
            folder.mkdir(0o700 if os.name == "posix" else 0o777)
        except OSError as error:
            # Its own message names a folder that nobody has asked for.
            raise type(error)(f"no file can be made in {parent}: {error.strerror}") from error
        lock = _lock(folder, wait=True)
        if folder.exists():
            return folder, lock
        # Another process took it for one that was left behind, before it was locked.
        if lock is not None:
            os.close(lock)


def _remove_if_left_behind(folder: Path) -> None:
    lock = _lock(folder, wait=False)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(folder: Path, wait: bool) -> int | None:
    """The descriptor of the locked folder; None where another one holds it, or folders cannot be locked (NFS)."""
    if fcntl is None:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
