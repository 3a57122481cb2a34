"""A saved model contains the LoRA: ComfyUI's save nodes ask for the patched weight, so it is baked for them.

ComfyUI stands a lazy Parameter in for each tensor of such a weight, one that can require gradients; for the
integers of NVFP4, INT8 and INT4 that raises (seen on 0.21 to 0.33, for any model that is not fully loaded).
Before 0.21 it writes what lies in the model: there the weights are baked for the time of the call.
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from qpatch.patching import Wrap

from . import branch, planning, report, weights

_BAKED = "comfy_patched_weights"

#: ComfyUI's class of what stands in for one tensor of a quantized weight until it is written (from 0.21 on).
LAZY = "LazyCastingParamPiece"

_SAVERS = ("model_state_dict_for_saving", "state_dict_for_saving")


def patches(module) -> list[Wrap]:
    patcher = module.ModelPatcher
    # Before 0.24 the whole work was done in the second.
    name = next(name for name in _SAVERS if name in vars(patcher))
    always = Wrap(patcher, "patch_weight_to_device", returning)
    if LAZY not in vars(module):
        return [Wrap(patcher, name, saving_baked), always]
    return [Wrap(patcher, name, saving), always, Wrap(vars(module)[LAZY], "__new__", without_gradient)]


def without_gradient(original):
    """The constructor of a lazy Parameter, for integers as well."""

    def __new__(cls, caster, state_dict_key, tensor):
        if tensor.is_floating_point():
            return original(cls, caster, state_dict_key, tensor)
        return torch.nn.Parameter.__new__(cls, tensor, requires_grad=False)

    return __new__


def saving(original):
    """ComfyUI's saver, taking layers with a branch for not patched yet: they are patched as they are written."""

    def state_dict_for_saving(self, *args, **kwargs):
        with _not_patched(self.model):
            result = original(self, *args, **kwargs)
        plan = planning.of(self.model)
        if plan is not None and plan.beside:
            report.baked_for_saving(plan)
        return result

    return state_dict_for_saving


def saving_baked(original):
    """The saver of a ComfyUI that knows no lazy quantized weights, with the LoRA in the weights that it collects."""

    def state_dict_for_saving(self, *args, **kwargs):
        plan = planning.of(self.model)
        if plan is None or plan.uuid != self.patches_uuid or not plan.beside:
            return original(self, *args, **kwargs)
        with _baked(self, plan):
            result = original(self, *args, **kwargs)
        report.baked_for_saving(plan)
        return result

    return state_dict_for_saving


@contextlib.contextmanager
def _baked(patcher, plan):
    before = {}
    try:
        for choice in plan.beside:
            module = weights.layer_of(patcher.model, choice.key)
            before[module] = module.weight, getattr(module, _BAKED, False)
            baked = patcher.patch_weight_to_device(choice.key, device_to=patcher.load_device, return_weight=True)
            module.weight = nn.Parameter(baked, requires_grad=False)
            setattr(module, _BAKED, True)
        yield
    finally:
        for module, (weight, mark) in before.items():
            module.weight = weight
            setattr(module, _BAKED, mark)


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

    Asked for the patched weight of a layer whose baked patches are in it, it adds only what runs beside; and it
    does not round a weight again for patches that change nothing.
    """

    def patch_weight_to_device(self, key, device_to=None, inplace_update=False, return_weight=False, *args, **kwargs):
        plan = planning.of(self.model)
        choice = plan.choices.get(key) if plan is not None and plan.uuid == self.patches_uuid else None
        if not return_weight or choice is None or not choice.side:
            return original(self, key, device_to, inplace_update, return_weight, *args, **kwargs)
        missing = choice.split.patches if key in self.backup else choice.split.effective
        whole, self.patches = self.patches, {other: self.patches[other] for other in self.patches if other != key}
        if missing:
            self.patches[key] = missing
        try:
            return original(self, key, device_to, inplace_update, return_weight, *args, **kwargs)
        finally:
            self.patches = whole

    return patch_weight_to_device
