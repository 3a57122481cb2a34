"""Files appear whole or not at all: written beside their place under another name, then moved there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from .workshop import workshop


class WouldOverwrite(FileExistsError):
    """The output is one of the inputs, or exists and was not to be replaced."""

    def __str__(self):
        return str(self.args[0])


def check(out: str | os.PathLike, inputs: Iterable[str | os.PathLike] = (), force: bool = False) -> Path:
    """The real path of ``out``, links followed; raises :class:`WouldOverwrite` or another ``OSError``.

    An input is never written over, ``force`` or not, also where ``out`` is another name or link of it.
    """
    path = Path(os.path.realpath(out))
    if path.is_dir():
        raise IsADirectoryError(f"{out} is a folder")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}")
    for source in inputs:
        if path.exists() and os.path.exists(source) and os.path.samefile(path, source):
            raise WouldOverwrite(f"{out} is the input {source}; name another output")
    if path.exists() and not force:
        raise WouldOverwrite(f"{out} exists; --force replaces it")
    return path


def publish(out: str | os.PathLike, write: Callable[[Path], None], *, inputs: Iterable[str | os.PathLike] = (),
            force: bool = False) -> Path:
    """Let ``write`` make a file in a hidden folder beside ``out``, and move it there; returns ``out``.

    Whatever ``write`` raises, or an interrupt, leaves nothing behind and an old file as it was. What a killed process
    leaves is hidden, and removed by the next call for a file in the same place.
    """
    path = check(out, inputs, force)
    with workshop(path.parent) as folder:
        # No .safetensors in it: ComfyUI lists those in hidden folders too.
        temporary = folder / "unfinished"
        write(temporary)
        _settle(temporary, path)
        _move(temporary, path, out, force)
    return Path(out)


def _settle(temporary: Path, path: Path) -> None:
    """On the disk in full, and with the rights that a file made here would have."""
    descriptor = os.open(temporary, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if os.name == "posix":
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~mask)


def _move(temporary: Path, path: Path, out, force: bool) -> None:
    if force:
        os.replace(temporary, path)
        return
    try:
        # A link fails where a file has appeared meanwhile; a move would write over it.
        os.link(temporary, path)
    except FileExistsError:
        raise WouldOverwrite(f"{out} exists; --force replaces it") from None
    except OSError:
        # No hard links here (FAT, some network drives).
        if path.exists():
            raise WouldOverwrite(f"{out} exists; --force replaces it") from None
        os.replace(temporary, path)
