"""Hook ``convrot`` on a stand-in of comfy.ops before ComfyUI 0.24."""

import torch
from convrot_reference import error, load, nvfp4_layer, put, same_entries

from qpatch import patching
from qpatch.finding import INCOMPATIBLE, NEEDED, NOT_NEEDED
from qpatch.hooks.convrot import loader


def linear(ops, entries, shape):
    layer = ops.mixed_precision_ops(compute_dtype=torch.float32).Linear(shape[1], shape[0], bias=False)
    load(layer, entries)
    return layer


def test_a_layer_loads_runs_takes_lora_and_saves(old_comfy_ops):
    weight, x = torch.randn(96, 256), torch.randn(20, 256)
    entries = nvfp4_layer(weight, 64)
    assert error(linear(old_comfy_ops, entries, weight.shape)(x), x @ weight.t()) > 1
    assert loader.examine(old_comfy_ops).verdict == NEEDED
    put(loader, old_comfy_ops, "convrot")
    layer = linear(old_comfy_ops, entries, weight.shape)
    assert error(layer(x), x @ weight.t()) < 0.12
    assert same_entries(layer.state_dict(), entries)
    layer.set_weight(layer.convert_weight(layer.weight) * 2, seed=0)
    assert error(layer.weight.dequantize(), weight * 2) < 0.15


def test_each_class_that_is_made_is_patched_once_and_others_may_see_what_is_under_it(old_comfy_ops):
    put(loader, old_comfy_ops, "convrot")
    method = old_comfy_ops.mixed_precision_ops().Linear._load_from_state_dict
    assert patching.marked(method) and not patching.marked(method.__wrapped__)


def test_taking_the_patch_back_leaves_new_classes_as_they_were(old_comfy_ops):
    before = old_comfy_ops.mixed_precision_ops
    patching.take_back(put(loader, old_comfy_ops, "convrot"))
    assert old_comfy_ops.mixed_precision_ops is before


def test_what_loads_layers_in_neither_known_way_is_incompatible(old_comfy_ops):
    made = old_comfy_ops.mixed_precision_ops
    old_comfy_ops.mixed_precision_ops = lambda *args, **kwargs: type("Ops", (), {"Linear": torch.nn.Linear})
    assert loader.examine(old_comfy_ops).verdict == INCOMPATIBLE
    old_comfy_ops.mixed_precision_ops = made
    put(loader, old_comfy_ops, "convrot")
    assert loader.examine(old_comfy_ops).verdict == NOT_NEEDED
