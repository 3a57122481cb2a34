"""The doctor: a list of checks, each a function of a :class:`context.Context` in a file of its kind.

No check imports torch, comfy, nunchaku or a node pack; they read files and package metadata.
"""

import importlib

from . import verdict

#: Name in reports -> "module:function", in the order of the report.
CHECKS = {
    "interpreter": "interpreter:interpreter",
    "activation": "activation:activation",
    "switches": "interpreter:switches",
    "installation": "installation:origin",
    "copies": "installation:copies",
    "leftovers": "installation:leftovers",
    "user-site": "installation:user_site",
    "torch": "nunchaku:torch",
    "nunchaku": "nunchaku:nunchaku",
    "nunchaku-build": "nunchaku:nunchaku_build",
    "diffusers": "nunchaku:diffusers",
    "comfyui": "comfyui:comfyui",
    "companions": "comfyui:companions",
    "node-pack": "node_packs:nunchaku_pack",
    "pack-wheel": "node_packs:wheel_mismatch",
    "pack-comfyui": "node_packs:pack_imports",
    "neighbours": "node_packs:neighbours",
    "dynamic-vram": "dynamic_vram:lazy_linear",
    "known-breaks": "known_breaks:known_breaks",
}


def examine(context) -> dict[str, verdict.Verdict]:
    """The verdict of every check, by its name. A check that fails says so in its place."""
    return {name: _run(function, context) for name, function in CHECKS.items()}


def _run(function: str, context) -> verdict.Verdict:
    module, _, attribute = function.partition(":")
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)(context)
    except Exception as error:
        return verdict.warn(f"this check itself failed: {type(error).__name__}: {error}",
                            "please report it, with the whole output of qpatch doctor")


def worst(verdicts) -> str:
    """The most serious of the verdicts."""
    return max((v.verdict for v in verdicts), key=verdict.ORDER.index, default=verdict.OK)
