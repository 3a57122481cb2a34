"""A saved model contains the LoRA: ComfyUI's save nodes ask for the patched weight, so it is baked for them."""

from __future__ import annotations

import contextlib

from qpatch.patching import Wrap

from . import branch, planning, report

_BAKED = "comfy_patched_weights"


def patches(patcher_class) -> list[Wrap]:
    return [Wrap(patcher_class, "model_state_dict_for_saving", saving),
            Wrap(patcher_class, "patch_weight_to_device", returning)]


def saving(original):
    """``model_state_dict_for_saving`` that takes layers with a branch for not patched yet: it patches them as it writes."""

    def model_state_dict_for_saving(self, *args, **kwargs):
        with _not_patched(self.model):
            result = original(self, *args, **kwargs)
        plan = planning.of(self.model)
        if plan is not None and plan.beside:
            report.baked_for_saving(plan)
        return result

    return model_state_dict_for_saving


@contextlib.contextmanager
def _not_patched(model):
    marked = [module for module in model.modules() if branch.of(module) is not None and getattr(module, _BAKED, False)]
    for module in marked:
        setattr(module, _BAKED, False)
    try:
        yield
    finally:
        for module in marked:
            setattr(module, _BAKED, True)


def returning(original):
    """``patch_weight_to_device`` that does not add twice what is in a weight already.

    Asked for the patched weight of a layer whose baked patches are in it, it adds only what runs beside.
    """

    def patch_weight_to_device(self, key, device_to=None, inplace_update=False, return_weight=False, *args, **kwargs):
        plan = planning.of(self.model)
        choice = plan.choices.get(key) if plan is not None and plan.uuid == self.patches_uuid else None
        if not return_weight or choice is None or not choice.side or key not in self.backup:
            return original(self, key, device_to, inplace_update, return_weight, *args, **kwargs)
        whole, self.patches = self.patches, {**self.patches, key: choice.split.patches}
        try:
            return original(self, key, device_to, inplace_update, return_weight, *args, **kwargs)
        finally:
            self.patches = whole

    return patch_weight_to_device
