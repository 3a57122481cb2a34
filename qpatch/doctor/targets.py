"""Where the hooks' targets are in this environment, found without importing anything."""

from dataclasses import dataclass
from pathlib import Path

from . import comfyui, node_packs, packages


@dataclass(frozen=True)
class Place:
    """One target of a hook on disk. ``file`` None: not there. ``package``: what it belongs to, with version.

    ``root``: the folder of the top-level package or of the node pack. ``looked``: whether there was
    a place to look at.
    """

    pattern: str
    package: str
    file: Path | None = None
    root: Path | None = None
    looked: bool = True

    def sentence(self, live: bool) -> str:
        """In plain words, for a hook that waits. ``live``: whether the import hook works."""
        if self.file is None and not self.looked:
            return "node packs were not looked at: name ComfyUI's folder (--comfyui PATH)"
        if self.file is None and self.root is not None:
            return f"{self.package} in {self.root} has none of what this hook mends"
        if self.file is None:
            return f"{self.package} is not here: nothing to mend"
        end = "it is patched when it is imported" if live else "it will NOT be patched, the import hook is not live"
        return f"{self.package} is installed; {end}"


def find(hook, context) -> list[Place]:
    """The places of all targets of ``hook``; for a tail pattern one for each node pack that fits."""
    found = []
    for target in hook.targets:
        found += [_module(target, context)] if target.exact else _in_packs(target, hook, context)
    return found


def _module(target, context) -> Place:
    top = target.pattern.partition(".")[0]
    program = comfyui.program(context)
    if program is not None and target.pattern == top and (program / f"{top}.py").is_file():
        release = f"ComfyUI {comfyui.version(program) or ''}".strip()
        return Place(target.pattern, release, program / f"{top}.py", program)
    if program is not None and (program / top / "__init__.py").is_file() or top == "comfy" and program:
        root, package = program / top, f"ComfyUI {comfyui.version(program) or ''}".strip()
    else:
        root = packages.folder(top, context)
        package = f"{top} {packages.version(top, context) or ''}".strip()
    file = packages.module_file(root, target.pattern) if root else None
    return Place(target.pattern, package, file, root)


def _in_packs(target, hook, context) -> list[Place]:
    tail = target.pattern.removeprefix("*.")
    found = []
    for pack in node_packs.packs(context):
        file = packages.module_file(pack.folder, f"pack.{tail}")
        if not pack.disabled and file and all(name in packages.text(file) for name in target.defines):
            found.append(Place(target.pattern, f"{pack.name} {pack.version or ''}".strip(), file, pack.folder))
    if found:
        return found
    looked = ", ".join(map(str, comfyui.folders(context)))
    what = f"a node pack with {tail.replace('.', '/')}.py"
    return [Place(target.pattern, f"{what} in {looked}" if looked else what, looked=bool(looked))]
