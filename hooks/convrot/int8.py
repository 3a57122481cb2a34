"""Hook ``convrot-int8``, comfy.ops: an INT8 ConvRot Linear keeps its rotation when its weight is requantized.

ComfyUI reads ``convrot`` of INT8 files and its tensors un-rotate by themselves. In its first releases with
INT8, setting a weight (LoRA baking, dynamic VRAM) quantized it anew with one scale and no rotation, which
comfy_kitchen's INT8 layout does unless it is told otherwise. There the layer gets a layout that always
rotates. From ComfyUI's own mend on (27 June 2026, release 0.27) there is nothing to do.
"""

from __future__ import annotations

from qpatch.finding import NEEDED, Finding, incompatible, not_needed
from qpatch.patching import Wrap

from . import config, kitchen
from .loader import adopting, has_loader


def examine(module) -> Finding:
    reason = kitchen.unusable()
    if reason is not None:
        return incompatible(reason)
    if config.INT8 not in vars(module).get("QUANT_ALGOS", {}):
        return not_needed("this ComfyUI loads no INT8 files (0.27 does), so none can lose its rotation")
    from . import probe

    found = probe.int8(module)
    if found.verdict == NEEDED and not has_loader(module):
        return incompatible("comfy.ops has no function that loads quantized layers")
    return found


def patches(module):
    yield Wrap(module, "_load_quantized_module", adopting(module, config.INT8_LAYOUT))
