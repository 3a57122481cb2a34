"""A machine that a test makes up, for the doctor to look at."""

import os
from pathlib import Path

import pytest

from qpatch.doctor.context import Context


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


class Machine:
    """Folders below a temporary one: an interpreter, its site-packages with qpatch, a ComfyUI."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.site = folder / "site-packages"
        self.comfyui = folder / "ComfyUI"
        self.executable = write(folder / "python" / "python")
        write(self.site / "qpatch" / "__init__.py", '__version__ = "0.1.0"\n')
        write(self.site / "qpatch.pth", "import qpatch; qpatch.activate()\n")
        write(self.site / "qpatch.start", "qpatch:activate\n")

    def context(self, **changes) -> Context:
        values = {
            "executable": self.executable, "package": self.site / "qpatch", "path": (self.site,),
            "site_folders": (self.site,), "platform": "linux", "python": (3, 12), "environ": {},
        }
        return Context(**{**values, **changes})

    def with_comfyui(self, **changes) -> Context:
        return self.context(comfyui=(self.comfyui,), **changes)

    def write(self, name: str, text: str = "") -> Path:
        return write(self.folder / name, text)

    def distribution(self, name: str, version: str, *, requires=(), tags=(), files=()) -> Path:
        """Metadata as pip leaves it, below site-packages."""
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        write(info / "METADATA", "\n".join([*lines, *(f"Requires-Dist: {need}" for need in requires)]) + "\n")
        write(info / "WHEEL", "\n".join(["Wheel-Version: 1.0", *(f"Tag: {tag}" for tag in tags)]) + "\n")
        write(info / "RECORD", "".join(f"{file},,\n" for file in files))
        return info

    def nunchaku(self, version: str = "1.2.1", **metadata) -> None:
        """The inference engine, as far as the doctor looks at it."""
        self.distribution("nunchaku", version, **metadata)
        self.write("site-packages/nunchaku/__init__.py")
        self.write("site-packages/nunchaku/models/__init__.py")
        self.write("site-packages/nunchaku/models/linear.py", "class SVDQW4A4Linear: ...\n")

    def torch(self, version: str, cuda: str | None = "13.0") -> None:
        self.write("site-packages/torch/__init__.py")
        self.write("site-packages/torch/version.py",
                   f"__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\n")

    def program(self, version: str = "0.33.0") -> None:
        """ComfyUI's own files, with the lines that decide about dynamic VRAM since 0.33."""
        self.write("ComfyUI/comfyui_version.py", f'# made by the build\n__version__ = "{version}"\n')
        self.write("ComfyUI/main.py", "if args.enable_dynamic_vram or (enables_dynamic_vram() and"
                                      " comfy.model_management.is_nvidia()):\n    pass\n")
        self.write("ComfyUI/comfy/__init__.py")
        self.write("ComfyUI/comfy/ops.py", "if (not comfy.memory_management.aimdo_enabled\n        or x):\n    pass\n"
                                           "self.comfy_need_lazy_init_bias = bias\n")
        self.write("ComfyUI/comfy/cli_args.py", 'parser.add_argument("--enable-dynamic-vram")\n')
        self.write("ComfyUI/requirements.txt", "torch\ncomfy-kitchen==0.2.31\ncomfy-aimdo==0.4.13\n")

    def pack(self, folder: str = "ComfyUI-nunchaku", name: str = "ComfyUI-nunchaku", version: str = "1.2.1") -> Path:
        """A node pack below custom_nodes that says by its pyproject.toml what it is."""
        home = self.comfyui / "custom_nodes" / folder
        write(home / "__init__.py", 'min_nunchaku_version = "1.0.0"\n')
        write(home / "pyproject.toml", f'[build-system]\nrequires = []\n\n[project]\nname = "{name}"\n'
                                       f'version = "{version}"\n\n[tool.comfy]\nDisplayName = "x"\n')
        return home


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture(autouse=True)
def nothing_imported(monkeypatch):
    """No hook has met a target yet: other tests of this process import stand-ins of them."""
    monkeypatch.setattr("qpatch.states._attempts", {})
    monkeypatch.setattr("qpatch.targets.in_sys_modules", list)


@pytest.fixture
def inactive(monkeypatch):
    """The import hook of this process answers as if it were not there."""
    monkeypatch.setattr("qpatch.states.live", lambda: False)


@pytest.fixture
def no_switches(monkeypatch):
    """No QPATCH variable of the caller."""
    for name in [name for name in os.environ if name.startswith("QPATCH")]:
        monkeypatch.delenv(name)
