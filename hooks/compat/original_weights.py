"""Hook ``comfy-compat-original-weights``: LoRA functions take ``original_weights``, also where they do not know it.

``calculate_weight`` got the argument in time; node packs pass it to older releases, and to
``LowVramPatch``. It matters to one kind of patch only ("model_as_lora", the difference to a second
model): for that one it is used or the call is refused, for all others it is left out.
"""

from . import Repair, Spot, accepts

NAME = "original_weights"


def _needs_them(patches) -> bool:
    return any(isinstance(patch[1], tuple) and patch[1] and patch[1][0] == "model_as_lora" for patch in patches)


def _lacks(original, module):
    return None if accepts(original, NAME) else f"{original.__qualname__} does not take {NAME}"


def _leave_out(original, module):
    def calculate_weight(patches, *args, **kwargs):
        given = kwargs.pop(NAME, None)
        if given is not None and _needs_them(patches):
            raise TypeError(f"this ComfyUI cannot apply a model as a LoRA: its calculate_weight does not take {NAME}")
        return original(patches, *args, **kwargs)
    return calculate_weight


def _pass_on(original, module):
    def call(self, weight, original_weights=None):
        patches = getattr(self, "prepared_patches", None) or self.patches[self.key]
        if original_weights is None or not _needs_them(patches):
            return original(self, weight)
        calculate = module.comfy.lora.calculate_weight
        return calculate(patches, weight, self.key, intermediate_dtype=weight.dtype, original_weights=original_weights)
    return call


def spots(module):
    if "LowVramPatch" in vars(module):
        return [Spot("LowVramPatch.__call__", _lacks, _pass_on)]
    return [Spot("calculate_weight", _lacks, _leave_out)]


REPAIR = Repair(spots, fine=f"{NAME} is taken")
examine, patches = REPAIR.examine, REPAIR.patches
