"""Hook ``comfy-compat-quant-keys``: ``ModelPatcher.get_key_patches`` on a model with quantized weights.

A quantized weight stands in the state dict as several entries (``weight``, ``weight_scale``, ...), of
which only the first is an attribute of its layer. The function looks each of them up and stops, and
with it merging, LoRA hooks and LoRA extraction. It is shown the entries that exist.
"""

from . import Repair, Spot


class _Layer:
    weight = 1.0


class _Patcher:
    """Just enough of a patcher: one layer, whose state dict names a part that is no attribute."""

    def __init__(self):
        self.backup, self.hook_backup, self.patches = {}, {}, {}
        self.model = _Layer()
        self.model.layer = _Layer()

    def model_state_dict(self, filter_prefix=None):
        return dict.fromkeys(("layer.weight", "layer.weight_scale"))


def _looks_up_parts(original, module):
    try:
        original(_Patcher())
    except AttributeError as error:
        return f"it stops at a part of a quantized weight ({error})"
    return None


def exists(model, key: str) -> bool:
    """Whether ``key`` names an attribute of a layer of ``model``."""
    for name in key.split("."):
        model = getattr(model, name, _Patcher)
    return model is not _Patcher


def _show_what_exists(original, module):
    def get_key_patches(self, filter_prefix=None):
        try:
            return original(self, filter_prefix)
        except AttributeError:
            there = {key: value for key, value in self.model_state_dict().items() if exists(self.model, key)}
        self.model_state_dict = lambda filter_prefix=None: there
        try:
            return original(self, filter_prefix)
        finally:
            del self.model_state_dict
    return get_key_patches


REPAIR = Repair(Spot("ModelPatcher.get_key_patches", _looks_up_parts, _show_what_exists),
                fine="parts of quantized weights are not looked up")
examine, patches = REPAIR.examine, REPAIR.patches
