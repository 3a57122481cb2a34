"""LoRAs that conditioning hooks switch on and off during sampling.

Here there is no choice to be made by prediction: ComfyUI copies a scheduled weight in place, which a
quantized weight does not allow.
"""

from __future__ import annotations

from qpatch.patching import Wrap

from . import branch, options, planning, weights
from .pair import compose


def patches(patcher_class) -> list[Wrap]:
    return [Wrap(patcher_class, "patch_hook_weight_to_device", patching_one),
            Wrap(patcher_class, "patch_hooks", patching), Wrap(patcher_class, "unpatch_hooks", unpatching)]


def _choice(patcher, key: str, patches):
    mode = options.BAKE if options.mode() == options.BAKE else options.SIDE
    return planning.choose(patcher.model, key, patches, mode)


def patching_one(original):
    """``patch_hook_weight_to_device`` without the patches that run beside."""

    def patch_hook_weight_to_device(self, hooks, combined_patches, key, original_weights, memory_counter):
        choice = _choice(self, key, combined_patches.get(key))
        if choice is not None and choice.side:
            if not choice.split.rest:
                original_weights.pop(key, None)
                return None
            combined_patches = {**combined_patches, key: choice.split.rest}
        return original(self, hooks, combined_patches, key, original_weights, memory_counter)

    return patch_hook_weight_to_device


def patching(original):
    """``patch_hooks`` that brings the branches to ``hooks`` as well."""

    def patch_hooks(self, hooks, *args, **kwargs):
        result = original(self, hooks, *args, **kwargs)
        wanted = self.get_combined_hook_patches(hooks=hooks) if hooks is not None else {}
        with self.use_ejected():
            _bring(self, wanted)
        return result

    return patch_hooks


def _bring(patcher, wanted: dict) -> None:
    pairs = {}
    for key, patches in wanted.items():
        choice = _choice(patcher, key, patches)
        if choice is not None and choice.side and choice.split.placed:
            layer = weights.layer_of(patcher.model, key)
            tensor = weights.coarse(layer)
            pairs[layer] = compose(choice.split.placed, tuple(tensor.shape), tensor.dtype, patcher.load_device)
    _clear(patcher.model, pairs)
    for layer, pair in pairs.items():
        branch.put(layer, scheduled=pair)


def _clear(model, but=()) -> None:
    for module in model.modules():
        if branch.of(module) is not None and module not in but:
            branch.remove(module, scheduled=True)


def unpatching(original):
    """``unpatch_hooks`` that takes the scheduled pairs out, unless it is about a few keys only."""

    def unpatch_hooks(self, whitelist_keys_set=None, *args, **kwargs):
        result = original(self, whitelist_keys_set, *args, **kwargs)
        if not whitelist_keys_set:
            with self.use_ejected():
                _clear(self.model)
        return result

    return unpatch_hooks
