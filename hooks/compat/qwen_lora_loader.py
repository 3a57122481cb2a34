"""Hook ``comfy-compat-qwen-lora-loader``: ComfyUI-QwenImageLoraLoader's own patches do not end qpatch's.

That pack replaces functions of nunchaku and ComfyUI-nunchaku when it loads, and again from timers. What
it puts there in place of a patch of qpatch is examined like any target, and where it has the fault (its
own mend of lazy Linears drops a declared bias) qpatch's patch is put around it and calls through.
"""

from qpatch import engine

from . import Repair, Spot

FUNCTIONS = ("apply_svdqw4a4_lazy_linear_patch", "apply_nunchaku_zimage_fuse_lazy_linear_patch", "apply_nunchaku_patch")


def _replaces(original, module):
    return "it replaces functions that qpatch may have patched"


def _then_look_again(original, module):
    def apply(*args, **kwargs):
        try:
            return original(*args, **kwargs)
        finally:
            engine.renew()
    return apply


REPAIR = Repair(
    *(Spot(name, _replaces, _then_look_again, absent=f"there is no {name}") for name in FUNCTIONS),
    fine="it replaces nothing of qpatch",
)
examine, patches = REPAIR.examine, REPAIR.patches
