"""The ComfyUI folder, read without starting or importing it."""

from pathlib import Path

from .. import places
from . import packages
from .verdict import Verdict, note, ok, warn

GIVE_PATH = "tell where it is: qpatch doctor --comfyui PATH"


def is_program(folder: Path) -> bool:
    """Whether ``folder`` holds ComfyUI itself."""
    return (folder / "main.py").is_file() and (folder / "comfy" / "ops.py").is_file()


def program(context) -> Path | None:
    """ComfyUI's own folder: the one that was named, else one at a usual place."""
    if context.comfyui:
        return next((folder for folder in context.comfyui if is_program(folder)), None)
    return next((folder for folder in _usual_places(context) if is_program(folder)), None)


def _usual_places(context) -> list[Path]:
    """The working directory; beside an embedded Python; around a virtual environment; sys.path."""
    here = places.working_directory()
    found = [here, here / "ComfyUI"] if here else []
    found.append(context.executable.parent.parent / "ComfyUI")
    root = places.venv_root(context.executable)
    if root is not None:
        found += [root.parent, root.parent / "ComfyUI"]
    return [*found, *context.path]


def folders(context) -> list[Path]:
    """Every folder that may have a ``custom_nodes``: those that were named, else the usual one."""
    if context.comfyui:
        return list(context.comfyui)
    found = program(context)
    return [found] if found else []


def version(folder: Path) -> str | None:
    """The version that the ComfyUI in ``folder`` says it is."""
    stated = packages.assigned(packages.text(folder / "comfyui_version.py"), "__version__")
    return stated or packages.project(folder / "pyproject.toml").get("version")


def comfyui(context) -> Verdict:
    """Which ComfyUI this is about."""
    folder = program(context)
    if folder is None:
        if context.comfyui:
            named = ", ".join(map(str, context.comfyui))
            return warn(f"no main.py and comfy/ in {named}: only custom_nodes is looked at there",
                        "name the folder with ComfyUI's main.py too (--comfyui may be given twice)")
        return note("no ComfyUI found from here", GIVE_PATH)
    how = "" if context.comfyui else " (found by itself)"
    return ok(f"ComfyUI {version(folder) or '(version unknown)'} in {folder}{how}")


def companions(context) -> Verdict:
    """comfy-kitchen and comfy-aimdo, against what this ComfyUI asks for."""
    folder = program(context)
    asked = packages.text(folder / "requirements.txt").splitlines() if folder else []
    said, faults = [], []
    for name in ("comfy-kitchen", "comfy-aimdo"):
        have, want = packages.version(name, context), packages.requirement(asked, name)
        said.append(f"{name} {have or 'not installed'}" + (f" (ComfyUI asks for {want})" if want else ""))
        if want is not None and not (have and packages.satisfies(have, want)):
            faults.append(f'"{name}{want}"')
    if faults:
        return warn(", ".join(said), "with ComfyUI's Python: pip install " + " ".join(faults))
    return ok(", ".join(said))
