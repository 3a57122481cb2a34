"""Where this interpreter looks: folders whose ``.pth`` files it reads, and ``._pth`` files.

Works without ``site`` having run (``python -S``), where it answers for a normal start.
"""

import os
import site
import sys
from dataclasses import dataclass
from pathlib import Path


def working_directory() -> Path | None:
    """The working directory; None where it has been removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def venv_root(executable: Path) -> Path | None:
    """The virtual environment that ``executable`` belongs to: the folder with ``pyvenv.cfg``."""
    # Not resolved: in a venv the interpreter is a link to the one it was made from.
    for folder in (executable.parent, executable.parent.parent):
        if (folder / "pyvenv.cfg").is_file():
            return folder
    return None


def user_site() -> Path | None:
    """The user's own site-packages; None where the platform has none."""
    try:
        return Path(site.getusersitepackages())
    except Exception:  # no home folder, or a platform without user sites
        return None


def site_folders() -> list[Path]:
    """The folders whose ``.pth`` files a normal start of this interpreter reads, user site last."""
    root = venv_root(Path(sys.executable))
    alone = root is not None and not _shares_system_packages(root)
    if root is None or same(root, sys.prefix):
        found = site.getsitepackages()
    else:
        # site has not run: it does not know yet that this is a virtual environment.
        found = site.getsitepackages([str(root)]) + ([] if alone else site.getsitepackages())
    enabled = site.ENABLE_USER_SITE
    if enabled is None:
        enabled = not alone and site.check_enableusersite()
    own = user_site() if enabled else None
    return unique([*found, own] if own else found)


def _shares_system_packages(root: Path) -> bool:
    text = (root / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace").lower()
    return "include-system-site-packages = true" in text


def unique(folders) -> list[Path]:
    """``folders`` without those that are the same place spelt another way."""
    seen: dict[str, Path] = {}
    for folder in folders:
        seen.setdefault(os.path.normcase(os.path.realpath(folder)), Path(folder))
    return list(seen.values())


def same(one, other) -> bool:
    """Whether two paths lead to the same place."""
    return os.path.normcase(os.path.realpath(one)) == os.path.normcase(os.path.realpath(other))


@dataclass(frozen=True)
class UnderscorePth:
    """A ``python3XX._pth`` file: where it stands it alone decides what is on ``sys.path``."""

    path: Path
    folders: tuple[str, ...]
    imports_site: bool


def parse_underscore_pth(path: Path, text: str) -> UnderscorePth:
    """Read the text of a ``._pth`` file: a folder a line, ``import site``, ``#`` comments."""
    lines = [line.partition("#")[0].strip() for line in text.lstrip("\ufeff").splitlines()]
    lines = [line for line in lines if line]
    folders = tuple(line for line in lines if not line.startswith("import "))
    # The interpreter compares the whole line; any other import line is ignored by it.
    return UnderscorePth(path, folders, "import site" in lines)


def underscore_pth(executable: Path) -> UnderscorePth | None:
    """The ``._pth`` file that governs ``executable``, if there is one beside it."""
    version = f"python{sys.version_info.major}{sys.version_info.minor}._pth"
    names = (executable.stem + "._pth", version)
    candidates = [executable.parent / name for name in names]
    candidates += sorted(executable.parent.glob("python*._pth"))
    for path in candidates:
        if path.is_file():
            return parse_underscore_pth(path, path.read_text(encoding="utf-8", errors="replace"))
    return None
