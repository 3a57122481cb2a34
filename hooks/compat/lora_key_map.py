"""Hook ``comfy-compat-lora-key-map``: asking for a model's LoRA keys gives the keys of that model.

The functions have ``key_map={}`` as default, one dict for the whole process, so a caller that passes none
(ComfyUI-nunchaku's patcher does) gets the keys of every model that was ever asked about.
"""

import inspect

from . import Repair, Spot


def _shares(original, module):
    parameter = inspect.signature(original).parameters.get("key_map")
    shared = parameter is not None and isinstance(parameter.default, dict)
    return "the default key map is one dict for the whole process" if shared else None


def _own(original, module):
    def model_lora_keys(model, key_map=None):
        return original(model, {} if key_map is None else key_map)
    return model_lora_keys


REPAIR = Repair(
    Spot("model_lora_keys_unet", _shares, _own),
    Spot("model_lora_keys_clip", _shares, _own),
    fine="no key map is shared",
)
examine, patches = REPAIR.examine, REPAIR.patches
