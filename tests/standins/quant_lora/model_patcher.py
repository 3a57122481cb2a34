"""Stand-in for comfy.model_patcher: how a classic patcher puts LoRA into quantized weights, and takes it out.

Kept: who reads ``self.patches`` and when, the shared backup, the marks on modules, what a layer that does not
fit on the device gets, scheduled patches, and how a model is saved. Layers are those of ``Linear`` below.
"""

import collections
import contextlib
import uuid

import torch
from comfy_kitchen.tensor import QuantizedTensor

#: What a layer takes of the memory that is there to load, in bytes.
LAYER = 1 << 20


def calculate_weight(patches, weight, key, original_weights=None):
    for strength, change, strength_model, offset, function in patches:
        part = weight if offset is None else weight.narrow(*offset)
        part *= strength_model
        added = (change[-1][0] if len(change) == 2 else change[0]) if isinstance(change, tuple) else change.dense()
        added = (strength * added.float()).reshape(part.shape)
        part += added if function is None else function(added)
    return weight


class Adapter:
    """``weights``: up, down, alpha, mid, dora_scale, reshape of a LoRA; w1, w2, alpha, 4 factors, t2, dora: LoKr."""

    def __init__(self, name, *weights):
        self.name, self.weights = name, weights

    def dense(self):
        if self.name == "lora":
            up, down, alpha = self.weights[:3]
            return up.float() @ down.float() * (1.0 if alpha is None else alpha / down.shape[0])
        return torch.kron(self.weights[0].float(), self.weights[1].float())


class Linear(torch.nn.Module):
    comfy_cast_weights = False

    def __init__(self, quantized, bias=None):
        super().__init__()
        self.out_features, self.in_features = quantized.shape
        self.weight = torch.nn.Parameter(quantized, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
        self.weight_function, self.bias_function = [], []

    def forward(self, input, *args, **kwargs):
        if not self.weight_function:
            return torch.nn.functional.linear(input, self.weight, self.bias)
        weight = self.weight.dequantize().to(input.dtype)
        for function in self.weight_function:
            weight = function(weight)
        return torch.nn.functional.linear(input, weight, self.bias)

    def convert_weight(self, weight, inplace=False, **kwargs):
        return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight

    def set_weight(self, weight, inplace_update=False, seed=None, return_weight=False, **kwargs):
        made = self.weight.requantize_from_float(weight, scale="recalculate", stochastic_rounding=seed)
        made = made.to(self.weight.dtype)
        if return_weight:
            return made
        assert inplace_update is False
        self.weight = torch.nn.Parameter(made, requires_grad=False)


class LowVramPatch:
    def __init__(self, key, patches):
        self.key, self.patches = key, patches

    def __call__(self, weight):
        return calculate_weight(self.patches[self.key], weight, self.key)


def get_key_weight(model, key):
    path, _, name = key.rpartition(".")
    layer = model.get_submodule(path)
    return getattr(layer, name), getattr(layer, f"set_{name}", None), getattr(layer, f"convert_{name}", None)


class LazyCastingParamPiece(torch.nn.Parameter):
    def __new__(cls, caster, state_dict_key, tensor):
        return super().__new__(cls, tensor)


class ModelPatcher:
    def __init__(self, model, load_device=torch.device("cpu"), offload_device=torch.device("cpu")):
        self.model, self.load_device, self.offload_device = model, load_device, offload_device
        self.patches, self.patches_uuid = {}, uuid.uuid4()
        self.backup, self.hook_patches, self.hook_backup, self.current_hooks = {}, {}, {}, None
        self.cached_hook_patches, self.hook_memory = {}, None
        if not hasattr(model, "current_weight_patches_uuid"):
            model.current_weight_patches_uuid = None

    def clone(self):
        other = type(self)(self.model, self.load_device, self.offload_device)
        other.patches, other.patches_uuid = {k: v[:] for k, v in self.patches.items()}, self.patches_uuid
        other.backup, other.hook_patches = self.backup, dict(self.hook_patches)
        return other

    def is_dynamic(self):
        return False

    @contextlib.contextmanager
    def use_ejected(self):
        yield

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        for key, change in patches.items():
            name, offset, function = (key, None, None) if isinstance(key, str) else (*key, None)[:3]
            self.patches.setdefault(name, []).append((strength_patch, change, strength_model, offset, function))
        self.patches_uuid = uuid.uuid4()

    def patch_weight_to_device(self, key, device_to=None, inplace_update=False, return_weight=False, force_cast=False):
        weight, set_func, convert_func = get_key_weight(self.model, key)
        if key not in self.patches:
            return weight
        if key not in self.backup and not return_weight:
            self.backup[key] = collections.namedtuple("Dimension", ["weight", "inplace_update"])(weight, inplace_update)
        dense = weight.detach().clone() if convert_func is None else convert_func(weight, inplace=True)
        result = calculate_weight(self.patches[key], dense.to(torch.float32, copy=True), key)
        if set_func is not None:
            return set_func(result, inplace_update=inplace_update, seed=sum(key.encode()), return_weight=return_weight)
        if return_weight:
            return result
        path, _, name = key.rpartition(".")
        setattr(self.model.get_submodule(path), name, torch.nn.Parameter(result.to(weight.dtype), requires_grad=False))

    def _layers(self):
        return [(name, layer) for name, layer in self.model.named_modules() if hasattr(layer, "comfy_cast_weights")]

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        with self.use_ejected():
            self.unpatch_hooks()
            for index, (name, layer) in enumerate(self._layers()):
                if not full_load and (index + 1) * LAYER > lowvram_model_memory:
                    self._lowvram(name, layer, force_patch_weights)
                elif not getattr(layer, "comfy_patched_weights", False):
                    layer.weight_function = []
                    for parameter, _ in layer.named_parameters(recurse=False):
                        self.patch_weight_to_device(f"{name}.{parameter}", device_to=device_to)
                    layer.comfy_patched_weights = True
            self.model.current_weight_patches_uuid = self.patches_uuid

    def _lowvram(self, name, layer, forced=False):
        layer.weight_function, key = [], f"{name}.weight"
        if key in self.patches and forced:
            self.patch_weight_to_device(key)
        elif key in self.patches:
            layer.weight_function = [LowVramPatch(key, self.patches)]

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        if not unpatch_weights:
            return
        self.unpatch_hooks()
        for key in list(self.backup):
            path, _, name = key.rpartition(".")
            original = torch.nn.Parameter(self.backup.pop(key).weight, requires_grad=False)
            setattr(self.model.get_submodule(path), name, original)
        self.model.current_weight_patches_uuid = None
        for _, layer in self._layers():
            layer.weight_function = []
            vars(layer).pop("comfy_patched_weights", None)

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        stale = self.model.current_weight_patches_uuid not in (None, self.patches_uuid)
        self.unpatch_model(self.offload_device, unpatch_weights=stale or force_patch_weights)
        if all(getattr(layer, "comfy_patched_weights", False) for _, layer in self._layers()):
            return
        self.load(device_to, lowvram_model_memory=extra_memory, force_patch_weights=force_patch_weights)

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False):
        for name, layer in self._layers()[:memory_to_free]:
            key = f"{name}.weight"
            if key in self.backup:
                layer.weight = torch.nn.Parameter(self.backup.pop(key).weight, requires_grad=False)
            self._lowvram(name, layer)
            layer.comfy_patched_weights = False

    def get_combined_hook_patches(self, hooks):
        combined = {}
        for reference, factor in hooks.items() if hooks is not None else ():
            for key, patches in self.hook_patches.get(reference, {}).items():
                combined.setdefault(key, []).extend((patch[0] * factor, *patch[1:]) for patch in patches)
        return combined

    def patch_hooks(self, hooks):
        """Groups of hooks are dicts here, and known by what they hold."""
        combined, cached = self.get_combined_hook_patches(hooks=hooks), None
        if hooks is not None:
            hooks = frozenset(hooks.items())
            cached = self.cached_hook_patches.get(hooks)
        if cached is None:
            self.unpatch_hooks()
        for key in combined:
            if cached is None:
                self.patch_hook_weight_to_device(hooks, combined, key, {key: None}, self.hook_memory)
            elif key in cached:
                self.patch_cached_hook_weights(cached, key, self.hook_memory)
        if cached is not None:
            self.unpatch_hooks({f"{name}.weight" for name, _ in self._layers()} - cached.keys())
        self.current_hooks = hooks

    def patch_cached_hook_weights(self, cached_weights, key, memory_counter):
        raise RuntimeError("Attempted to call copy_() on an invalid python storage.")

    def patch_hook_weight_to_device(self, hooks, combined_patches, key, original_weights, memory_counter):
        weight, set_func, convert_func = get_key_weight(self.model, key)
        self.hook_backup[key] = weight
        dense = calculate_weight(combined_patches[key], convert_func(weight, inplace=True).clone(), key)
        del original_weights[key]
        set_func(dense, inplace_update=True, seed=1)

    def unpatch_hooks(self, whitelist_keys_set=None):
        if not whitelist_keys_set:
            self.hook_backup.clear()
            self.current_hooks = None

    def model_state_dict_for_saving(self, model=None, prefix=""):
        """As it is written: a layer that is not marked as patched is patched on the way."""
        found = dict(self.model.state_dict())
        for name, layer in self._layers():
            key = f"{name}.weight"
            if not getattr(layer, "comfy_patched_weights", False):
                found[key] = self.patch_weight_to_device(key, return_weight=True)
        return found

    def state_dict_for_saving(self):
        return self.model_state_dict_for_saving()
