"""A stand-in for comfy.model_patcher: how dynamic VRAM attaches LoRA to a weight, and who asks for weights.

``load`` gives each patched weight a function that is applied whenever the weight is brought to the device;
``patch_weight_to_device`` (saving uses it) patches what ``get_key_weight`` finds.
"""

import types
import uuid

import torch
from comfy_kitchen.tensor import QuantizedTensor


def _calculate_weight(patches, weight, key):
    for strength, adapter, strength_model, offset, function in patches:
        part = weight if offset is None else weight.narrow(*offset)
        part *= strength_model
        delta = adapter.delta().reshape(part.shape).to(part.dtype) * strength
        part += delta if function is None else function(delta)
    return weight


comfy = types.SimpleNamespace(
    utils=types.SimpleNamespace(string_to_seed=lambda text: sum(text.encode())),
    lora=types.SimpleNamespace(calculate_weight=_calculate_weight),
)


class LoRAAdapter:
    """``weights``: up, down, alpha, mid, dora_scale, reshape."""

    name = "lora"

    def __init__(self, *weights):
        self.weights = weights

    def delta(self):
        up, down, alpha = self.weights[:3]
        return up.flatten(1) @ down.flatten(1) * (1.0 if alpha is None else alpha / down.shape[0])


def get_key_weight(model, key):
    layer = model.get_submodule(key.rpartition(".")[0])
    return layer.weight, getattr(layer, "set_weight", None), getattr(layer, "convert_weight", None)


class ModelPatcher:
    pass


class ModelPatcherDynamic(ModelPatcher):
    def __init__(self, model, load_device=torch.device("cpu")):
        self.model, self.load_device = model, load_device
        self.patches, self.patches_uuid, self.pins_dropped = {}, uuid.uuid4(), 0

    def clone(self):
        other = ModelPatcherDynamic(self.model, self.load_device)
        other.patches, other.patches_uuid = {k: v[:] for k, v in self.patches.items()}, self.patches_uuid
        return other

    def add_patches(self, patches, strength=1.0, offset=None, function=None, strength_model=1.0):
        for key, adapter in patches.items():
            self.patches.setdefault(key, []).append((strength, adapter, strength_model, offset, function))
        self.patches_uuid = uuid.uuid4()

    def load(self, device_to=None, dirty=False):
        for name, layer in self.model.named_modules():
            if getattr(layer, "weight", None) is not None:
                key = f"{name}.weight"
                patched = key in self.patches
                layer.weight_lowvram_function = (
                    (lambda weight, key=key: _calculate_weight(self.patches[key], weight, key)) if patched else None)

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        pass

    def partially_unload_ram(self, ram_to_unload):
        self.pins_dropped += 1

    def patch_weight_to_device(self, key):
        weight, _, convert = get_key_weight(self.model, key)
        dense = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight.clone()
        return _calculate_weight(self.patches.get(key, []), dense.float(), key)


def cast(layer):
    """The weight as it arrives on the device: patched by the function, if the layer has one."""
    dense = layer.weight.dequantize() if isinstance(layer.weight, QuantizedTensor) else layer.weight
    function = layer.weight_lowvram_function
    return dense if function is None else function(dense.clone())
