"""Hook ``comfy-compat-qwen-calls``: Nunchaku Qwen-Image gets each argument under its own name.

ComfyUI calls ``_forward`` by position; between releases arguments came in and left in the middle, so a
pack of another age takes reference latents for guidance, and more of the kind. The positions are those
of ComfyUI's own class, which the pack's class derives from, and that gives the names. A block called as
ComfyUI calls its own (with ``transformer_options``) does not stop either: its attention never read them.
"""

import sys

from qpatch import log

from . import Repair, Spot, parameters
from .calls import fit, lacking


def _base_forward(module):
    return vars(module.QwenImageTransformer2DModel)["_forward"]


def _other_order(original, module):
    ours, comfy = list(parameters(original)), list(parameters(_base_forward(module)))
    wrong = [(a, b) for a, b in zip(ours, comfy) if a != b]
    return "; ".join(f"it takes {b} for {a}" for a, b in wrong[:2]) if wrong else None


def _by_name(original, module):
    order = list(parameters(_base_forward(module)))
    known = parameters(original)

    def _forward(self, *args, **kwargs):
        for name, value in zip(order, args):
            if kwargs.setdefault(name, value) is not value:
                raise TypeError(f"_forward() got two values for {name}")
        lost = [name for name in order[:len(args)] if name not in known and kwargs[name] is not None]
        if lost:
            log.warning(f"{type(self).__name__} does not know {', '.join(lost)}: no effect")
        unknown = [name for name in order if name not in known]
        return original(self, **{name: value for name, value in kwargs.items() if name not in unknown})
    return _forward


def _comfy_block():
    return vars(sys.modules["comfy.ldm.qwen_image.model"].QwenImageTransformerBlock)["forward"]


def _lacks(original, module):
    missing = lacking(original, _comfy_block())
    return f"its blocks do not take {', '.join(missing)}" if missing else None


def _takes(original, module):
    return fit(original, _comfy_block(), inert={"transformer_options": lambda block, value: True})


REPAIR = Repair(
    Spot("NunchakuQwenImageTransformer2DModel._forward", _other_order, _by_name),
    Spot("NunchakuQwenImageTransformerBlock.forward", _lacks, _takes),
    fine="it takes the arguments of ComfyUI's own class, in their order",
)
examine, patches = REPAIR.examine, REPAIR.patches
