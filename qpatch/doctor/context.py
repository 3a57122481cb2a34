"""What the checks look at: this interpreter and the ComfyUI folders, gathered in one object.

Checks read nothing else of the process, so a test can hand them a machine that it made up.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .. import places


@dataclass(frozen=True)
class Flags:
    """The interpreter's switches that matter for start-up files."""

    no_site: bool = False
    no_user_site: bool = False
    isolated: bool = False
    ignore_environment: bool = False

    @classmethod
    def of_this_process(cls) -> "Flags":
        return cls(*(bool(getattr(sys.flags, name)) for name in cls.__dataclass_fields__))

    def switches(self) -> list[str]:
        """As they are written on the command line; ``-I`` stands for ``-E`` and ``-s`` too."""
        found = ["-S"] if self.no_site else []
        if self.isolated:
            return [*found, "-I"]
        return found + ["-s"] * self.no_user_site + ["-E"] * self.ignore_environment


@dataclass(frozen=True)
class Context:
    """One interpreter, its import path, the installed qpatch and the ComfyUI folders to look at.

    ``path``: ``sys.path`` without the folder that the command itself was started from.
    ``package``: the folder of the imported ``qpatch``. ``finders``: finders beside the
    path-based one (editable installs have their own).
    """

    executable: Path
    package: Path
    path: tuple[Path, ...]
    site_folders: tuple[Path, ...]
    user_site: Path | None = None
    flags: Flags = Flags()
    python: tuple[int, int] = sys.version_info[:2]
    environ: Mapping[str, str] = field(default_factory=dict)
    platform: str = sys.platform
    finders: tuple = ()
    comfyui: tuple[Path, ...] = ()

    @classmethod
    def here(cls, comfyui=()) -> "Context":
        """This process."""
        import qpatch

        return cls(
            executable=Path(sys.executable or "python"),
            package=Path(qpatch.__file__).parent,
            path=tuple(Path(entry) for entry in import_path() if os.path.exists(entry)),
            site_folders=tuple(places.site_folders()),
            user_site=places.user_site(),
            flags=Flags.of_this_process(),
            environ=os.environ,
            finders=tuple(f for f in sys.meta_path if getattr(f, "__module__", "").startswith("__editable__")),
            comfyui=tuple(Path(folder) for folder in comfyui),
        )

    @property
    def python_command(self) -> str:
        """The interpreter, as it is typed."""
        return f'"{self.executable}"' if " " in str(self.executable) else str(self.executable)

    @property
    def search_path(self) -> tuple[Path, ...]:
        """Where modules are found in a normal start, also when this one was ``python -S``."""
        return tuple(places.unique([*self.path, *self.site_folders]))


def import_path() -> list[str]:
    """``sys.path`` without the working directory that ``python -m`` puts in front."""
    entries, here = list(sys.path), places.working_directory()
    if here and entries and not getattr(sys.flags, "safe_path", False) and places.same(entries[0] or ".", here):
        if not places.same(entries[0] or ".", Path(__file__).parents[2]):
            del entries[0]
    return entries
