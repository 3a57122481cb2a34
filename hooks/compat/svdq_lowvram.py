"""Hook ``comfy-compat-svdq-lowvram``: quantized Z-Image layers have what ComfyUI's low-VRAM path reads.

ComfyUI-nunchaku gives them ``comfy_cast_weights``, so that they can be offloaded. A layer with that
attribute is taken for one of ComfyUI's own, which also have the lists ``weight_function`` and
``bias_function``; unloading a part of a model that has a LoRA stops without them.
"""

from . import Repair, Spot

LISTS = ("weight_function", "bias_function")


class _Layer:
    pass


def _lacks_lists(original, module):
    ours, comfy = _Layer(), _Layer()
    comfy.comfy_cast_weights = False
    original(ours, comfy)
    missing = [name for name in LISTS if not hasattr(ours, name)]
    return f"offloadable quantized layers lack {' and '.join(missing)}" if missing else None


def _give_lists(original, module):
    def add_comfy_cast_weights_attr(svdq_linear, comfy_linear):
        original(svdq_linear, comfy_linear)
        if hasattr(svdq_linear, "comfy_cast_weights"):
            for name in LISTS:
                if not hasattr(svdq_linear, name):
                    setattr(svdq_linear, name, [])
    return add_comfy_cast_weights_attr


REPAIR = Repair(
    Spot("add_comfy_cast_weights_attr", _lacks_lists, _give_lists,
         absent="quantized layers are not offloaded in this release"),
    fine="offloadable quantized layers have all that the low-VRAM path reads",
)
examine, patches = REPAIR.examine, REPAIR.patches
