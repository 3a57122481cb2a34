"""The nunchaku wheel: is it the right project, and was it built for this torch and this Python."""

import re
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from . import packages, static_imports
from .verdict import Verdict, note, ok, problem, skipped, warn

GET_IT = ("install the wheel that fits your torch and Python from the releases of the nunchaku project "
          "(nunchaku-ai/nunchaku on GitHub)")


def engine(context) -> Path | None:
    """The folder of the inference engine; None where nunchaku is absent, or another project."""
    folder = packages.folder("nunchaku", context)
    return folder if folder and packages.module_file(folder, "nunchaku.models.linear") else None


def nunchaku(context) -> Verdict:
    """Installed or not, and whether it is the inference engine or the PyPI project of the same name."""
    folder = packages.folder("nunchaku", context)
    version = packages.version("nunchaku", context)
    if folder is None:
        return note("nunchaku is not installed for this Python", "for SVDQuant models: " + GET_IT)
    if engine(context) is None:
        return problem(f"nunchaku {version or '(version unknown)'} in {folder} is another project of that name (pip "
                       "install nunchaku brings it): it has no quantized layers",
                       f"pip uninstall nunchaku, then {GET_IT}")
    return ok(f"nunchaku {version or '(version unknown)'} in {folder}")


def torch(context) -> Verdict:
    """The installed torch and what it was built for."""
    version, cuda = torch_build(context)
    if version is None:
        return warn("torch is not installed for this Python", "run qpatch with the Python that ComfyUI runs on")
    return ok(f"torch {version}, " + (f"built for CUDA {cuda}" if cuda else "built without CUDA"))


def torch_build(context) -> tuple[str | None, str | None]:
    """(version, CUDA version or None) of the installed torch, read from its files."""
    folder = packages.folder("torch", context)
    source = packages.text(folder / "version.py") if folder else ""
    version = packages.assigned(source, "__version__") or packages.version("torch", context)
    return version, packages.assigned(source, "cuda")


def nunchaku_build(context) -> Verdict:
    """The torch, CUDA and Python that the nunchaku wheel was built for, against those in use."""
    folder, version = engine(context), packages.version("nunchaku", context)
    if folder is None:
        return skipped("nunchaku is not installed")
    faults = [*_wrong_torch(version or "", context), *_wrong_python(folder, context)]
    if faults:
        return problem("; ".join(faults) + ". It fails to import, whatever qpatch does", GET_IT)
    return ok("the nunchaku wheel fits this torch and this Python")


def _wrong_torch(version: str, context) -> list[str]:
    """Compare a version like "1.2.1+cu13.0torch2.10" with the installed torch."""
    have, have_cuda = torch_build(context)
    want = re.search(r"torch(\d+(?:\.\d+)+)", version)
    want_cuda = re.search(r"cu(\d+)", version)
    faults = []
    if want and have and packages.release(want.group(1))[:2] != packages.release(have)[:2]:
        faults.append(f"nunchaku {version} was built for torch {want.group(1)}, installed is torch {have}")
    if want_cuda and have and (have_cuda or "").split(".")[0] != want_cuda.group(1)[:2]:
        faults.append(f"nunchaku {version} was built for CUDA {want_cuda.group(1)[:2]}, torch {have} "
                      + (f"for CUDA {have_cuda}" if have_cuda else "without CUDA"))
    return faults


def _wrong_python(folder: Path, context) -> list[str]:
    """Compare the extension module's file name, or else the wheel's tags, with this interpreter."""
    compiled = [path.name for pattern in ("_C*.so", "_C*.pyd") for path in sorted(folder.glob(pattern))]
    running = packages.python_name(context.python)
    if compiled:
        fits = any(name == "_C" + suffix for name in compiled for suffix in EXTENSION_SUFFIXES)
        return [] if fits else [f"nunchaku's {compiled[0]} is for another Python or system than this {running}"]
    tags = _tags(context)
    wanted = "cp{}{}".format(*context.python)
    if tags and not any(tag.startswith((wanted, "py3")) or "-abi3-" in tag for tag in tags):
        return [f"the nunchaku wheel is tagged {', '.join(tags)}, this is Python {running}"]
    return []


def _tags(context) -> list[str]:
    installed = packages.distribution("nunchaku", context)
    return re.findall(r"^Tag:\s*(\S+)", (installed.read_text("WHEEL") or "") if installed else "", re.MULTILINE)


def diffusers(context) -> Verdict:
    """nunchaku's package import reads classes of diffusers that only later releases have."""
    folder = engine(context)
    if folder is None:
        return skipped("nunchaku is not installed")
    installed = packages.distribution("nunchaku", context)
    asked = packages.requirement(installed.requires if installed else (), "diffusers")
    # 0.36 is the first release with the Z-Image classes.
    wanted = f"diffusers{asked or '>=0.36'}"
    home, have = packages.folder("diffusers", context), packages.version("diffusers", context)
    if home is None:
        return problem("nunchaku imports diffusers, and it is not installed", f"pip install \"{wanted}\"")
    lacking = static_imports.missing(folder / "models", home)
    if lacking:
        return problem(f"diffusers {have} lacks what nunchaku imports: {lacking[0]}; every import of nunchaku fails",
                       f"pip install -U \"{wanted}\"")
    if asked and have and not packages.satisfies(have, asked):
        return warn(f"diffusers {have} is installed, nunchaku asks for {wanted}", f"pip install -U \"{wanted}\"")
    return ok(f"diffusers {have} has all that nunchaku imports from it")
