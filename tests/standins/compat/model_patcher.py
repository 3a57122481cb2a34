"""Stand-in for comfy.model_patcher: what callers pass today, and what a quantized weight does to get_key_patches."""

import uuid

import comfy.lora
from comfy.patcher_extension import CallbacksMP
from comfy.quant_ops import QuantizedTensor


class LowVramPatch:
    def __init__(self, key, patches, convert_func=None, set_func=None):
        self.key, self.patches, self.prepared_patches = key, patches, None

    def __call__(self, weight):
        return comfy.lora.calculate_weight(self.patches[self.key], weight, self.key, intermediate_dtype=weight.dtype)


def get_key_weight(model, key):
    place, name = model, key
    while "." in name:
        head, _, name = name.partition(".")
        place = getattr(place, head)
    return getattr(place, name), getattr(place, "set_" + name, None), getattr(place, "convert_" + name, None)


class ModelPatcher:
    def __init__(self, model, load_device="cpu", offload_device="cpu", size=0, weight_inplace_update=False):
        self.model, self.load_device, self.offload_device = model, load_device, offload_device
        self.size, self.weight_inplace_update = size, weight_inplace_update
        self.patches, self.backup, self.hook_backup = {}, {}, {}
        self.patches_uuid = uuid.uuid4()
        self.callbacks = {}
        self.log = []

    def is_dynamic(self):
        return False

    def model_size(self):
        return 100

    def get_all_callbacks(self, when):
        return self.callbacks.get(when, [])

    def model_patches_to(self, device):
        pass

    def eject_model(self):
        pass

    def clone(self, disable_dynamic=False, model_override=None, force_deepcopy=False):
        if force_deepcopy:
            raise RuntimeError("cached_patcher_init is not initialized")
        model, backup = model_override or (self.model, self.backup)
        n = type(self)(model, self.load_device, self.offload_device)
        n.backup = backup
        return n

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        self.log.append(("unpatch", device_to, unpatch_weights))

    def patch_weight_to_device(self, key, device_to=None, inplace_update=False, return_weight=False, force_cast=False):
        weight, _, _ = get_key_weight(self.model, key)
        if return_weight:
            return weight + self.patches.get(key, 0)
        setattr(self.model, key, weight + self.patches.get(key, 0))

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        self.model.model_loaded_weight_memory = self.model_size()

    def detach(self, unpatch_all=True):
        if unpatch_all:
            self.unpatch_model(self.offload_device, unpatch_weights=unpatch_all)
        for callback in self.get_all_callbacks(CallbacksMP.ON_DETACH):
            callback(self, unpatch_all)
        return self.model

    def model_state_dict(self, filter_prefix=None):
        return self.model.state_dict()

    def get_key_patches(self, filter_prefix=None):
        found = {}
        for key in self.model_state_dict():
            if filter_prefix is not None and not key.startswith(filter_prefix):
                continue
            weight, _, convert = get_key_weight(self.model, key)
            found[key] = [(weight, convert)] + self.patches.get(key, [])
        return found


__all__ = ["LowVramPatch", "ModelPatcher", "QuantizedTensor", "get_key_weight"]
