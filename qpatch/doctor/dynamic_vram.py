"""Whether ComfyUI builds Linears without weights here: what makes nunchaku's Z-Image loader crash.

ComfyUI decides it at start, from its arguments, the GPU, torch and comfy-aimdo. Its files and the
installed packages tell all of that but the arguments.
"""

import platform
import re

from . import comfyui, packages
from .nunchaku import torch_build
from .verdict import Verdict, ok, problem, skipped

#: Arguments of ComfyUI that turn dynamic VRAM off.
OFF_ARGUMENTS = "--disable-dynamic-vram, --highvram, --gpu-only, --novram or --cpu"


def lazy_linear(context) -> Verdict:
    """"lazy Linear active: yes | no | unknown", with the reason, and whether qpatch is there for it."""
    answer, reason = decide(context)
    found = f"lazy Linear active: {answer} ({reason})"
    if answer == "no":
        return ok(found)
    if answer == "unknown":
        return skipped(reason)
    from .. import states

    if states.live():
        return ok(found + ". Hook lazy-linear is ready for it")
    return problem(found + ". Z-Image of ComfyUI-nunchaku dies on it with \"'NoneType' object has no attribute "
                   "'dtype'\", and qpatch is not active", "see the check 'activation'")


def decide(context) -> tuple[str, str]:
    """("yes" | "no" | "unknown", reason)."""
    running = packages.loaded("comfy.memory_management")
    if running is not None and hasattr(running, "aimdo_enabled"):
        return ("yes", "dynamic VRAM is on in this process") if running.aimdo_enabled else (
            "no", "dynamic VRAM is off in this process")
    folder = comfyui.program(context)
    if folder is None:
        return "unknown", "no ComfyUI folder was looked at"
    reason = _by_comfyui(folder, context) or _by_packages(folder, context)
    if reason:
        return "no", reason
    if torch_build(context)[0] is None:
        return "unknown", "torch is not installed for this Python"
    return "yes", _yes(folder)


def _text(folder, name: str) -> str:
    return packages.text(folder / name)


def _by_comfyui(folder, context) -> str | None:
    """Why this release of ComfyUI does not do it on this system."""
    ops = _text(folder, "comfy/ops.py")
    if "comfy_need_lazy_init_bias" not in ops and "aimdo_enabled" not in ops:
        return "this ComfyUI has no lazy Linear"
    # Up to 0.28 the condition names Windows as well; the file is clearer than a table of releases.
    if re.search(r"not comfy\.model_management\.WINDOWS\s+or not comfy\.memory_management\.aimdo_enabled", ops):
        if not context.platform.startswith("win"):
            return f"ComfyUI {comfyui.version(folder)} does it on Windows only"
    if "is_wsl()" in _dynamic_condition(folder) and _is_wsl():
        return "not under WSL in this ComfyUI, unless it is started with --enable-dynamic-vram"
    return None


def _dynamic_condition(folder) -> str:
    """The lines of main.py that decide about dynamic VRAM."""
    return "\n".join(line for line in _text(folder, "main.py").splitlines() if "enables_dynamic_vram()" in line)


def _is_wsl() -> bool:
    return "microsoft" in platform.uname().release.lower()


def _by_packages(folder, context) -> str | None:
    """Why it is off with the packages that are installed."""
    if packages.folder("comfy_aimdo", context) is None:
        return "comfy-aimdo is not installed"
    version, cuda = torch_build(context)
    if version is None:
        return None
    if cuda is None and "is_nvidia()" in _dynamic_condition(folder):
        return f"torch {version} is not built for NVIDIA GPUs"
    if packages.release(version) < (2, 8):
        return f"torch {version}: dynamic VRAM needs 2.8"
    return None


def _yes(folder) -> str:
    if "--enable-dynamic-vram" in _text(folder, "comfy/cli_args.py"):
        return f"on an NVIDIA GPU, unless ComfyUI is started with {OFF_ARGUMENTS}"
    return "only if ComfyUI is started with --fast or --fast dynamic_vram"
