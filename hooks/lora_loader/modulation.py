"""Whether the modulation layers of a model can take LoRA: the hook ``qwen-modulation`` says so on the block's class."""

from __future__ import annotations

import re

#: Attribute of a block class: the order in which its forward takes the rows of img_mod.1 and txt_mod.1.
ROWS = "qpatch_modulation_rows"
INTERLEAVED = "interleaved"

_LAYER = re.compile(r"(?P<block>.+)\.(img|txt)_mod\.1")


def judge(model):
    """``leave_out`` for :func:`qpatch.lora.plan`: quantized modulation layers whose row order nobody vouches for."""

    def why(name: str, module) -> str | None:
        found = _LAYER.fullmatch(name)
        if found is None or not hasattr(module, "wzeros"):
            return None
        block = type(model.get_submodule(found["block"]))
        if getattr(block, ROWS, None) == INTERLEAVED:
            return None
        return "modulation layer: the order of its rows is not known (hook qwen-modulation is off or does not know this version)"

    return why
