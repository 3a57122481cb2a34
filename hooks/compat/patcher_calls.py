"""Hook ``comfy-compat-patcher-calls``: ComfyUI-nunchaku's patchers take the arguments that ComfyUI's callers pass.

What must happen, argument by argument: ``clone(disable_dynamic=True)`` (torch.compile) asks for a
patcher that is not dynamic, and these never are. ``clone(model_override=...)`` and
``force_deepcopy`` ask for a clone of another model: ComfyUI's own method makes it, with the empty
backup of a fresh patcher, because what is backed up belongs to the other model.
``patch_weight_to_device(return_weight=True)`` (LoRA extraction, saving) asks for the patched weight
and for the model to stay as it is; ComfyUI's own method does that for each layer that has a weight.
"""

from . import Repair, Spot
from .calls import fit, lacking

CLASSES = ("ZImageModelPatcher", "NunchakuModelPatcher")
THROUGH = ("clone", "patch_weight_to_device")
INERT = {"disable_dynamic": lambda patcher, value: not patcher.is_dynamic()}


def spots(module):
    """Each method of the pack's patchers that overrides one of ComfyUI's and lacks arguments of it."""
    found = []
    for name in CLASSES:
        cls = vars(module).get(name, object)
        for method, override in vars(cls).items():
            base = next((vars(parent)[method] for parent in cls.__mro__[1:-1] if method in vars(parent)), None)
            if callable(base) and callable(override) and lacking(override, base):
                found.append(_spot(f"{name}.{method}", base))
    return found


def _spot(path, base):
    def broken(original, module):
        missing = lacking(original, base)
        return f"{path} does not take {', '.join(missing)}" if missing else None

    def mend(original, module):
        return fit(original, base, inert=INERT, through=original.__name__ in THROUGH)

    return Spot(path, broken, mend)


REPAIR = Repair(spots, fine="the patchers take every argument that ComfyUI's own take")
examine, patches = REPAIR.examine, REPAIR.patches
