"""Hook ``convrot-bake`` (off by default), comfy.model_patcher: with dynamic VRAM, LoRA added once, at load.

Dynamic VRAM applies the LoRA of a weight each time the weight is brought to the device. For a ConvRot weight
that is: un-rotate, add, rotate, requantize. This hook does it once per load, in the rotated basis where the
factors are at hand: (W + up down) H = W H + up (down H), so only the rank x in factor is rotated and the
weight is rounded once.

The price is memory: each baked weight exists twice, the original (often still in the mapped file) and its
replacement. The original goes back, the same object, when the LoRAs of the model change and when it is
unloaded. What was replaced, by what, and for which set of LoRAs is kept in the model itself; while a
replacement stands, whatever asks ComfyUI for "the weight of this key" (saving, merging, patching anew) is
given the original, or the LoRA would be added twice.
"""

from __future__ import annotations

from qpatch.finding import Finding, incompatible, needed
from qpatch.patching import Wrap

from . import kitchen

_METHODS = ("load", "unpatch_model", "partially_unload_ram")


def examine(module) -> Finding:
    reason = kitchen.unusable()
    if reason is not None:
        return incompatible(reason)
    dynamic = vars(module).get("ModelPatcherDynamic")
    if dynamic is None or "get_key_weight" not in vars(module):
        return incompatible("this ComfyUI has no dynamic VRAM")
    missing = [name for name in _METHODS if name not in vars(dynamic)]
    if missing:
        return incompatible(f"ModelPatcherDynamic has no {', '.join(missing)}")
    return needed("dynamic VRAM adds LoRA to a weight each time it is brought to the device")


def patches(module):
    from . import baking

    yield Wrap(module.ModelPatcherDynamic, "load", _baking_load(module, baking))
    yield Wrap(module.ModelPatcherDynamic, "unpatch_model", _restoring_unpatch(baking))
    yield Wrap(module, "get_key_weight", _unbaked_weight(baking))


def _baking_load(model_patcher, baking):
    def make(original):
        def load(self, *args, **kwargs):
            restored = baking.restore(self.model, keep=self.patches_uuid)
            result = original(self, *args, **kwargs)
            baked = baking.bake(self, model_patcher)
            if restored or baked:
                # Pinned copies of the weights that were replaced would be sent to the device in their place.
                self.partially_unload_ram(1e32)
            return result

        return load

    return make


def _restoring_unpatch(baking):
    def make(original):
        def unpatch_model(self, device_to=None, unpatch_weights=True, *args, **kwargs):
            result = original(self, device_to, unpatch_weights, *args, **kwargs)
            if unpatch_weights:
                baking.restore(self.model)
            return result

        return unpatch_model

    return make


def _unbaked_weight(baking):
    def make(original):
        def get_key_weight(model, key, *args, **kwargs):
            weight, *functions = original(model, key, *args, **kwargs)
            return (baking.original_of(model, key, weight), *functions)

        return get_key_weight

    return make
