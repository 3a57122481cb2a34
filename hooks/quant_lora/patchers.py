"""Hook on comfy.model_patcher: where ComfyUI patches the weights of a model, and where it takes that back."""

from __future__ import annotations

import inspect
import uuid

from qpatch.finding import incompatible, needed
from qpatch.patching import Wrap

from . import carrying, planning, report, running, saving, schedule

#: What ``qpatch status`` adds to the hook's line.
details = report.details

_METHODS = ("load", "unpatch_model", "partially_load", "partially_unload", "patch_weight_to_device", "patch_hooks",
            "unpatch_hooks", "patch_hook_weight_to_device", "patch_cached_hook_weights", "get_combined_hook_patches",
            "state_dict_for_saving")


def examine(module):
    missing = [name for name in _METHODS if name not in vars(module.ModelPatcher)]
    if missing:
        return incompatible(f"ModelPatcher has no {', '.join(missing)}")
    parameters = list(inspect.signature(module.ModelPatcher.load).parameters)
    if "force_patch_weights" not in parameters:
        return incompatible(f"ModelPatcher.load takes ({', '.join(parameters)})")
    return needed("LoRA is added to quantized weights, which are then rounded again: small deltas drown in that")


def patches(module):
    classes = [vars(module)[name] for name in ("ModelPatcher", "ModelPatcherDynamic") if name in vars(module)]
    found = [Wrap(cls, name, make) for cls in classes for name, make in (
        ("load", loading), ("unpatch_model", unpatching), ("partially_unload", partially_unloading),
        ("partially_load", carrying.keeping_weights),
    ) if name in vars(cls)]
    return [*found, *saving.patches(module), *schedule.patches(module.ModelPatcher)]


def loading(original):
    """``load`` that shows ComfyUI only the patches it is to bake, and puts the others beside."""

    def load(self, *args, **kwargs):
        forced = inspect.signature(original).bind(self, *args, **kwargs).arguments.get("force_patch_weights", False)
        plan = planning.plan(self)
        if forced:
            return _baked_load(self, plan, original, args, kwargs)
        with planning.reduced(self, plan):
            result = original(self, *args, **kwargs)
        running.attach(self, plan)
        report.tell(plan)
        return result

    return load


def _baked_load(patcher, plan, original, args, kwargs):
    """Somebody wants the LoRAs in the weights themselves, as savers of older releases do."""
    running.detach(patcher.model)
    result = original(patcher, *args, **kwargs)
    if plan.beside:
        report.baked_for_saving(plan)
        # No patcher's set of patches: the next use of the model patches it anew, our way.
        patcher.model.current_weight_patches_uuid = uuid.uuid4()
    return result


def unpatching(original):
    def unpatch_model(self, device_to=None, unpatch_weights=True, *args, **kwargs):
        result = original(self, device_to, unpatch_weights, *args, **kwargs)
        if unpatch_weights:
            running.detach(self.model)
        return result

    return unpatch_model


def partially_unloading(original):
    """Layers that go back to system memory get their patches at each use: but for those that run beside."""

    def partially_unload(self, *args, **kwargs):
        plan = planning.of(self.model)
        if plan is None or plan.uuid != self.model.current_weight_patches_uuid:
            return original(self, *args, **kwargs)
        with planning.reduced(self, plan):
            result = original(self, *args, **kwargs)
        running.attach(self, plan)
        return result

    return partially_unload
