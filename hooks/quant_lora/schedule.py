"""LoRAs that conditioning hooks switch on and off during sampling.

A sampler switches several times in each step. So there is nothing to predict here: what has a small rank runs
beside (pairs of switching.py), and what has to be baked is in a weight that stands in (standin.py), which ComfyUI
caches as it caches the weights that it patches itself. ComfyUI's own way is to copy into the weight, which a
quantized one does not allow.
"""

from __future__ import annotations

from qpatch import log, toggles
from qpatch.patching import Wrap

from . import branch, options, standin, weights
from .splitting import Split, split
from .switching import joined


def patches(patcher_class) -> list[Wrap]:
    return [Wrap(patcher_class, "patch_hook_weight_to_device", patching_one),
            Wrap(patcher_class, "patch_cached_hook_weights", patching_from_cache),
            Wrap(patcher_class, "patch_hooks", patching), Wrap(patcher_class, "unpatch_hooks", unpatching)]


def _split(layer, patches: list[tuple]) -> Split:
    found = split(patches, tuple(weights.coarse(layer).shape))
    if options.mode() == options.BAKE:
        return Split(found.effective, rest=found.effective)
    return found


def patching_one(original):
    """``patch_hook_weight_to_device`` that leaves coarse weights as they are."""

    def patch_hook_weight_to_device(self, hooks, combined_patches, key, original_weights, memory_counter):
        layer = weights.layer_of(self.model, key)
        if layer is None or not combined_patches.get(key):
            return original(self, hooks, combined_patches, key, original_weights, memory_counter)
        found = _split(layer, combined_patches[key])
        if found.rest:
            _stand_in(self, hooks, layer, key, found.rest, original_weights, memory_counter)
        original_weights.pop(key, None)
        return None

    return patch_hook_weight_to_device


def _stand_in(patcher, hooks, layer, key: str, patches: list[tuple], original_weights, memory_counter) -> None:
    try:
        weight = standin.made(layer, key, patches, original_weights)
    except Exception as error:
        if toggles.strict() or "out of memory" in str(error).lower():
            raise
        log.warning(f"quant-lora: a scheduled change has no effect on {key}, it cannot be baked into its weight: "
                    f"{type(error).__name__}: {error}")
        return
    standin.put(layer, weight)
    # ComfyUI counts memory in one of its two modes only; in the other it caches nothing.
    if memory_counter is not None:
        device = weight.device
        kept = weight if memory_counter.use(weight) else weight.to(device=patcher.offload_device)
        patcher.cached_hook_patches.setdefault(hooks, {})[key] = kept, device


def patching_from_cache(original):
    """``patch_cached_hook_weights`` for the weights that stand in."""

    def patch_cached_hook_weights(self, cached_weights, key, memory_counter):
        layer = weights.layer_of(self.model, key)
        if layer is None:
            return original(self, cached_weights, key, memory_counter)
        weight, device = cached_weights[key]
        standin.put(layer, weight.to(device=device))
        return None

    return patch_cached_hook_weights


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
        layer = weights.layer_of(patcher.model, key)
        if layer is None:
            continue
        found, tensor = _split(layer, patches), weights.coarse(layer)
        pair = joined(found.patches, tuple(tensor.shape), tensor.dtype, patcher.load_device)
        if pair is not None:
            pairs[layer] = pair
    _clear_pairs(patcher.model, pairs)
    for layer, pair in pairs.items():
        branch.put(layer, scheduled=pair)


def _clear_pairs(model, but=()) -> None:
    for module in model.modules():
        if module not in but and branch.of(module) is not None:
            branch.remove(module, scheduled=True)


def unpatching(original):
    """``unpatch_hooks`` that gives layers their own weights back, and takes the pairs out with the last of them."""

    def unpatch_hooks(self, whitelist_keys_set=None, *args, **kwargs):
        result = original(self, whitelist_keys_set, *args, **kwargs)
        with self.use_ejected():
            for path, module in self.model.named_modules():
                if standin.stands(module) and (not whitelist_keys_set or f"{path}.weight" in whitelist_keys_set):
                    standin.remove(module)
            if not whitelist_keys_set:
                _clear_pairs(self.model)
        return result

    return unpatch_hooks
