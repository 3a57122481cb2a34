"""Another set of LoRAs on a model that is loaded already: only the pairs change, the weights stay where they are.

ComfyUI knows sets of patches by an identifier. When it changes, the whole model leaves the device, gets its
originals back, and is loaded anew. What runs beside the product needs none of that: if what is to be baked is
the same for both sets, the model is told that its weights are those of the new set.
"""

from __future__ import annotations

from . import memory, planning, report, running, svdq


def keeping_weights(original):
    """``partially_load`` that does not reload for a change of what runs beside the product."""

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False, *args, **kwargs):
        if force_patch_weights:
            return original(self, device_to, extra_memory, force_patch_weights, *args, **kwargs)
        same = _same_weights(self)
        extra_memory = memory.left(self, extra_memory)
        if not same:
            return original(self, device_to, extra_memory, force_patch_weights, *args, **kwargs)
        self.model.current_weight_patches_uuid = self.patches_uuid
        result = original(self, device_to, extra_memory, force_patch_weights, *args, **kwargs)
        plan = planning.plan(self)
        running.attach(self, plan)
        report.tell(plan)
        return result

    return partially_load


def _same_weights(patcher) -> bool:
    """Whether the weights in the model, loaded for another set of patches, are what ``patcher`` wants as well."""
    last, loaded = planning.of(patcher.model), patcher.model.current_weight_patches_uuid
    if last is None or last.uuid != loaded or loaded == patcher.patches_uuid:
        return False
    if not last.plain or any(map(svdq.appended, patcher.model.modules())):
        return False
    found = planning.plan(patcher)
    return found.plain and _same_patches(last.baked, found.baked)


def _same_patches(one: dict, other: dict) -> bool:
    """Whether two dicts of patches hold the same ones; clones of a patcher share the tuples, not the lists."""
    return one.keys() == other.keys() and all(
        len(one[key]) == len(other[key]) and all(a is b for a, b in zip(one[key], other[key])) for key in one)
