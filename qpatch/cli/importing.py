"""``qpatch status --import``: import the targets in this process, so that the hooks meet them."""

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path


def import_targets(places, program: Path | None, lazy: bool) -> dict[str, str]:
    """Import every target that is on disk; {file: error} for those that did not let themselves.

    ``program``: ComfyUI's folder, for the targets that need it. ``lazy``: whether ComfyUI would build
    Linears without weights.
    """
    errors = {}
    # Packages print banners on import; standard output belongs to the report.
    with contextlib.redirect_stdout(sys.stderr):
        if program is not None:
            _prepare_comfyui(program, lazy, errors)
        for place in places:
            if place.file is not None:
                _attempt(lambda: importlib.import_module(_name(place)), str(place.file), errors)
    return errors


def _attempt(action, key: str, errors: dict[str, str]) -> None:
    try:
        action()
    except (Exception, SystemExit) as error:
        errors[key] = f"{type(error).__name__}: {error}".partition("\n")[0]


def _prepare_comfyui(program: Path, lazy: bool, errors) -> None:
    """Let ``comfy`` be imported as in ComfyUI, but on the CPU: a report must not take the GPU's memory."""
    sys.path.insert(0, str(program))
    _attempt(_choose_cpu, str(program), errors)
    _attempt(lambda: _say_what_comfyui_does(lazy), str(program), errors)


def _choose_cpu() -> None:
    importlib.import_module("comfy.cli_args").args.cpu = True


def _say_what_comfyui_does(lazy: bool) -> None:
    """What main.py would decide about dynamic VRAM here: hooks report whether Linears are lazy."""
    importlib.import_module("comfy.memory_management").aimdo_enabled = lazy


def _name(place) -> str:
    """The module name that an import of this place has in ComfyUI."""
    if not place.pattern.startswith("*."):
        return place.pattern
    # ComfyUI makes a pack's name of its path. Its __init__ is not run: it may load all of its nodes.
    package = str(place.root).replace(".", "_x_")
    if package not in sys.modules:
        spec = importlib.util.spec_from_file_location(package, place.root / "__init__.py",
                                                      submodule_search_locations=[str(place.root)])
        sys.modules[package] = importlib.util.module_from_spec(spec)
    return package + place.pattern.removeprefix("*")
