"""What a composition in ComfyUI is made with: the rank budget, and the layers that are left out."""

from __future__ import annotations

import functools
import os
import re

from qpatch import log

#: Environment variable: the rank to which a change without a small exact one is cut.
MAX_RANK = "QPATCH_MAX_RANK"
_DEFAULT_RANK = 128

#: Attribute of a block class: the order in which its forward takes the rows of img_mod.1 and txt_mod.1. Hook
#: ``qwen-modulation`` puts it on a class whose forward it has tried.
ROWS = "qpatch_modulation_rows"
INTERLEAVED = "interleaved"

_LAYER = re.compile(r"(?P<block>.+)\.(img|txt)_mod\.1")


def leave_out(model):
    """What :func:`qpatch.lora.plan` is to leave out of ``model``: nothing (None), or its quantized modulation layers.

    One of two answers, not a closure: a composition is found again by the options it was made with.
    """
    for name, module in model.named_modules():
        found = _LAYER.fullmatch(name) if hasattr(module, "wzeros") else None
        if found and getattr(type(model.get_submodule(found["block"])), ROWS, None) != INTERLEAVED:
            return quantized_modulation
    return None


def quantized_modulation(name: str, module) -> str | None:
    """The reason why a modulation layer is left out; None for every other module."""
    if hasattr(module, "wzeros") and _LAYER.fullmatch(name):
        return ("the row order of modulation layers is not known: hook qwen-modulation is off or does not know this "
                "version")
    return None


def max_rank() -> int:
    """The rank budget of a layer, from QPATCH_MAX_RANK."""
    return _rank(os.environ.get(MAX_RANK, "").strip())


@functools.cache
def _rank(text: str) -> int:
    if text and not (text.isdecimal() and int(text) > 0):
        log.warning(f"{MAX_RANK}: '{text}' is not a positive number; {_DEFAULT_RANK} is used")
        text = ""
    return int(text or _DEFAULT_RANK)
