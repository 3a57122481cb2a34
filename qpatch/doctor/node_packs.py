"""Custom node packs, recognised by what is in them: people rename the folders."""

from dataclasses import dataclass
from pathlib import Path

from . import comfyui, nunchaku, packages, static_imports
from .verdict import Verdict, note, ok, problem, skipped

#: What ComfyUI-nunchaku's models/zimage.py defines, in every release that has one.
ZIMAGE_NAMES = ("fuse_to_svdquant_linear", "ComfyNunchakuZImageAttention")
#: Packs that mend or replace the same things (by the name in their pyproject.toml).
NEIGHBOURS = {
    "comfyui-qwenimageloraloader": "patches from_linear and Qwen-Image's forward itself",
    "comfyui-hswq-loader-and-tools": "wraps comfy.ops and the model patcher itself",
}


@dataclass(frozen=True)
class Pack:
    """One folder below ``custom_nodes``; ``disabled`` as ComfyUI or its Manager leave packs out."""

    folder: Path
    name: str
    version: str | None
    disabled: bool

    def __str__(self):
        return f"{self.name} {self.version or ''}".strip() + f" in {self.folder}"


def packs(context) -> list[Pack]:
    """The packs of all ``custom_nodes`` folders, in the order of their folders' names."""
    found = []
    for home in comfyui.folders(context):
        nodes = home / "custom_nodes"
        for folder in [*_subfolders(nodes), *_subfolders(nodes / ".disabled")]:
            stated = packages.project(folder / "pyproject.toml")
            disabled = folder.name.endswith(".disabled") or folder.parent.name == ".disabled"
            found.append(Pack(folder, stated.get("name", folder.name), stated.get("version"), disabled))
    return found


def _subfolders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in ("__pycache__", ".disabled"))


def nunchaku_packs(context) -> list[Pack]:
    """Every copy of ComfyUI-nunchaku, whatever its folder is called; disabled ones too."""
    return [pack for pack in packs(context) if _is_nunchaku(pack)]


def _is_nunchaku(pack: Pack) -> bool:
    if packages.normal(pack.name) == "comfyui-nunchaku" and (pack.folder / "__init__.py").is_file():
        return True
    zimage = packages.text(pack.folder / "models" / "zimage.py")
    return all(name in zimage for name in ZIMAGE_NAMES)


def _active(context) -> list[Pack]:
    return [pack for pack in nunchaku_packs(context) if not pack.disabled]


def nunchaku_pack(context) -> Verdict:
    """How many copies of ComfyUI-nunchaku there are, and whether ComfyUI loads one."""
    if not comfyui.folders(context):
        return skipped("no ComfyUI folder was looked at")
    found = nunchaku_packs(context)
    active = _active(context)
    if len(active) > 1:
        return problem(f"{len(active)} copies of ComfyUI-nunchaku: {'; '.join(map(str, active))}. All of "
                       "them load, and the nodes of the one that happens to be last win",
                       "keep one; rename the folder of the other to NAME.disabled")
    if active:
        return ok(str(active[0]))
    if found:
        return problem(f"ComfyUI-nunchaku is disabled by its folder name: {found[0].folder}",
                       "enable it in ComfyUI-Manager, or move the folder into custom_nodes without '.disabled'")
    return note("ComfyUI-nunchaku is not in custom_nodes")


def wheel_mismatch(context) -> Verdict:
    """ComfyUI-nunchaku against the nunchaku wheel: its stated minimum, and what it imports."""
    active = _active(context)
    wheel, have = nunchaku.engine(context), packages.version("nunchaku", context)
    if not active or wheel is None:
        return skipped("nunchaku or ComfyUI-nunchaku was not found")
    pack = active[0]
    least = packages.assigned(packages.text(pack.folder / "__init__.py"), "min_nunchaku_version")
    lacking = static_imports.missing(pack.folder, wheel)
    todo = f"install a nunchaku wheel of the same release as the pack ({pack.version or 'see its pyproject.toml'})"
    if lacking:
        return problem(f"{pack.name} {pack.version or ''} imports what nunchaku {have} lacks: {_some(lacking)}",
                       todo)
    if least and have and packages.release(have) < packages.release(least):
        return problem(f"{pack.name} {pack.version or ''} needs nunchaku {least} or later, installed is {have}", todo)
    return ok(f"{pack.name} {pack.version or ''} finds all it imports from nunchaku {have}")


def _mending(lacking: static_imports.Missing) -> str | None:
    """The hook that supplies a missing name, where it is on and can act."""
    from .. import catalogue, states, toggles

    for hook in catalogue.HOOKS if states.live() else ():
        here = any(target.pattern == lacking.module for target in hook.targets)
        if here and lacking.name and lacking.name in hook.mends and toggles.why_disabled(hook) is None:
            return hook.name
    return None


def _some(lacking) -> str:
    more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
    return ", ".join(map(str, lacking[:3])) + more + "; the nodes in those files do not load"


def pack_imports(context) -> Verdict:
    """Names that ComfyUI-nunchaku imports from this ComfyUI and does not find there."""
    folder, active = comfyui.program(context), _active(context)
    if folder is None or not active:
        return skipped("ComfyUI or ComfyUI-nunchaku was not found")
    lacking = static_imports.missing(active[0].folder, folder / "comfy")
    mended = {str(found): hook for found in lacking if (hook := _mending(found))}
    lacking = [found for found in lacking if str(found) not in mended]
    if mended and not lacking:
        return note("this ComfyUI lacks what the pack imports, and qpatch supplies it: "
                    + ", ".join(f"{found} by {hook}" for found, hook in mended.items()))
    if lacking:
        return problem(f"ComfyUI {comfyui.version(folder)} lacks what {active[0].name} imports: {_some(lacking)}",
                       "update ComfyUI, or ComfyUI-nunchaku, to versions that go together")
    return ok(f"{active[0].name} finds all it imports from ComfyUI")


def neighbours(context) -> Verdict:
    """Other packs that patch the same places."""
    if not comfyui.folders(context):
        return skipped("no ComfyUI folder was looked at")
    found = [f"{pack} ({NEIGHBOURS[packages.normal(pack.name)]})" for pack in packs(context)
             if packages.normal(pack.name) in NEIGHBOURS and not pack.disabled]
    if found:
        return note("; ".join(found) + ". They can stay: qpatch status shows who stands where")
    return ok("no pack that patches the same places")
