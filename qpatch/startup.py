"""The start-up files ``qpatch.pth`` and ``qpatch.start``: what they hold, writing, removing.

Both call ``qpatch.activate`` at interpreter start; Pythons from 3.15 on prefer the second.
A file of that name with anything else in it is somebody else's and is never touched; an empty one is filled.
"""

import ast
import locale
import os
import re
import stat
import sys
import tempfile
from pathlib import Path

IMPORT_LINE = "import qpatch; qpatch.activate()"
ENTRY_LINE = "qpatch:activate"
NAMES = ("qpatch.pth", "qpatch.start")
#: A folder on ``sys.path`` in ASCII alone; twice does no harm, as a venv reads its .pth files twice.
_FOLDER_LINE = "import sys; sys.path += {{{}}} - {{*sys.path}}"
_QUOTED = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_FOLDER = re.compile(re.escape(_FOLDER_LINE.format("@")).replace("@", _QUOTED))


class StartupError(Exception):
    """A start-up file cannot be written or removed; the message says which, why, and what to do."""


def text_of(name: str, package_parent: Path | None = None) -> str:
    """What the file ``name`` holds.

    ``package_parent``: the folder that holds the package, where it is not on ``sys.path``
    by itself; it becomes a path line in front of the import line.
    """
    if name == "qpatch.start":
        return ENTRY_LINE + "\n"
    return (_path_line(str(package_parent)) + "\n" if package_parent else "") + IMPORT_LINE + "\n"


def _path_line(folder: str) -> str:
    try:
        folder.encode("utf-8")
    except UnicodeEncodeError as error:
        raise StartupError(f"the folder name {folder!r} is no text in this locale: install qpatch into a folder with a"
                           " plain name, or run this in a UTF-8 locale") from error
    # Before 3.13 site decodes in the locale of each start, and one byte that does not fit ends the interpreter
    # (LC_ALL=C is enough): there such a folder is written in ASCII.
    if sys.version_info >= (3, 13) or folder.isascii():
        return folder
    return _FOLDER_LINE.format(ascii(folder))


def read_by(python: tuple[int, int]) -> tuple[str, ...]:
    """The names of the files that call us in that Python (PEP 829: 3.18 forgets the first)."""
    return NAMES[:1] if python < (3, 15) else NAMES if python < (3, 18) else NAMES[1:]


def present(folders, python: tuple[int, int]) -> list[Path]:
    """Those files in ``folders`` that this Python would read."""
    return [path for folder in folders for name in read_by(python) if (path := folder / name).is_file()]


def editable(folder: Path) -> bool:
    """Whether an editable install of qpatch stands in ``folder``: its package is found without a path line."""
    return any(folder.glob("__editable__*qpatch*"))


def encoding() -> str:
    """How ``site`` decodes ``.pth`` files in this Python."""
    if sys.version_info >= (3, 13):
        return "utf-8"
    # From 3.11 on UTF-8 mode does not change what site takes for the locale's encoding.
    return locale.getencoding() if sys.version_info >= (3, 11) else locale.getpreferredencoding(False)


def read(path: Path) -> str | None:
    """The text of a start-up file; None if there is none. Undecodable bytes become U+FFFD."""
    return path.read_bytes().decode(encoding(), errors="replace") if path.is_file() else None


def ours(text: str) -> bool:
    """Whether ``text`` holds only what qpatch writes: its own line, and folders before it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or lines[-1] not in (IMPORT_LINE, ENTRY_LINE):
        return False
    return all(os.path.isabs(line) or _FOLDER.fullmatch(line) for line in lines[:-1])


def path_lines(text: str) -> list[Path]:
    """The folders that a ``.pth`` text puts on ``sys.path``."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [ast.literal_eval(found[1]) if (found := _FOLDER.fullmatch(line)) else line for line in lines]
    return [Path(line) for line in lines if line and not line.startswith(("#", "import ", "import\t"))]


def hidden(status: os.stat_result) -> bool:
    """Whether ``site`` skips a file of this status: the hidden flag of macOS or of Windows."""
    mac = getattr(status, "st_flags", 0) & getattr(stat, "UF_HIDDEN", 0x8000)
    windows = getattr(status, "st_file_attributes", 0) & stat.FILE_ATTRIBUTE_HIDDEN
    return bool(mac or windows)


def write(folder: Path, package_parent: Path | None = None) -> list[tuple[Path, str]]:
    """Put both files into ``folder``; (path, "written" | "unchanged") for each.

    Raises :class:`StartupError` before anything is written if ``folder`` does not take files
    or one of them exists and is not ours.
    """
    paths = [folder / name for name in NAMES]
    _refuse_foreign(paths)
    done = []
    for path in paths:
        text = text_of(path.name, package_parent)
        if read(path) == text and not hidden(path.lstat()):
            done.append((path, "unchanged"))
            continue
        _replace(path, text)
        done.append((path, "written"))
    return done


def remove(folder: Path) -> list[Path]:
    """Remove both files from ``folder``; the paths of those that were there."""
    paths = [folder / name for name in NAMES]
    _refuse_foreign(paths)
    paths = [path for path in paths if path.is_file()]
    for path in paths:
        try:
            path.unlink()
        except OSError as error:
            raise StartupError(f"cannot remove {path} ({error.strerror}): nothing that comes after it was removed;"
                               " run this as the owner of the folder") from error
    return paths


def _refuse_foreign(paths) -> None:
    for path in paths:
        if path.is_dir():
            raise StartupError(f"{path} is a folder: look at it and remove it yourself")
        text = read(path)
        if text and text.strip() and not ours(text):
            raise StartupError(f"{path} holds lines that qpatch did not write: look at it and remove it yourself")


def _replace(path: Path, text: str) -> None:
    """Write by way of a temporary file, so that a start in the middle never reads half of it."""
    temporary = None
    try:
        # The prefix is not qpatch: a .pth file must never exist half written under any name.
        handle, temporary = tempfile.mkstemp(prefix=".qpatch-", suffix=".tmp", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode("utf-8"))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise StartupError(f"cannot write {path} ({error.strerror}): run this as the owner of the folder,"
                           " or use a virtual environment") from error
