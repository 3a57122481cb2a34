"""Beside the HSWQ pack: its layers stay its own, and after its purge the next load is ours.

The functions below do to comfy.ops what that pack's loaders and its purge do.
"""

import json

import pytest
import torch
from convrot_reference import error, load, nvfp4_layer, put

from qpatch.hooks.convrot import hswq, loader
from qpatch.hooks.convrot.rotation import rotate


@pytest.fixture
def mended(comfy_ops):
    put(loader, comfy_ops, "convrot")
    return comfy_ops


def with_its_own_loader(ops):
    """One of its loaders bypasses whatever stands there."""
    def replacement(module, super_load, state_dict, prefix, *args, **kwargs):
        stock = original
        while hasattr(stock, "__wrapped__"):
            stock = stock.__wrapped__
        stock(module, super_load, state_dict, prefix, *args, **kwargs)
        module._hswq_nvfp4, module._hswq_nvfp4_convrot_groupsize = True, 64

    original = ops._load_quantized_module
    replacement._hswq_nvfp4_full_load = True
    ops._load_quantized_module = replacement


def with_arming_after_the_load(ops):
    """Another one calls what stands there and marks the layer afterwards."""
    orig_load = ops._load_quantized_module

    def arming(module, super_load, state_dict, prefix, *args, **kwargs):
        settings = json.loads(bytes(state_dict[f"{prefix}comfy_quant"].tolist()))
        orig_load(module, super_load, state_dict, prefix, *args, **kwargs)
        if settings.get("convrot"):
            module._hswq_nvfp4_convrot, module._hswq_nvfp4_convrot_groupsize = True, 64

    arming._hswq_nvfp4_comfy_only = True
    ops._load_quantized_module = arming


def with_tidying(ops):
    """A third only tidies up the configuration of INT8 layers; it lies outermost."""
    original_load = ops._load_quantized_module

    def tidying(*args, **kwargs):
        return original_load(*args, **kwargs)

    tidying._hswq_int8_decode_patched = True
    ops._load_quantized_module = tidying


def peel(ops):
    """Its purge: takes off what carries its marks, down to the first function without."""
    while any(name.startswith("_hswq_") for name in vars(ops._load_quantized_module)):
        ops._load_quantized_module = next(
            cell.cell_contents for cell in ops._load_quantized_module.__closure__ if callable(cell.cell_contents))


def forward_of_the_pack(layer, x):
    """It rotates the activation of a layer that it has marked, then runs ComfyUI's forward."""
    if getattr(layer, "_hswq_nvfp4_convrot", False) or getattr(layer, "_hswq_nvfp4", False):
        x = rotate(x, layer._hswq_nvfp4_convrot_groupsize)
    return layer(x)


def loaded(ops, weight):
    layer = ops.mixed_precision_ops(compute_dtype=torch.float32, disabled={"nvfp4"}).Linear(256, 96, bias=False)
    load(layer, nvfp4_layer(weight, 64))
    return layer


@pytest.mark.parametrize("steps", [
    (with_its_own_loader,), (with_arming_after_the_load,), (with_tidying, with_arming_after_the_load),
    (with_arming_after_the_load, with_tidying), (with_its_own_loader, with_tidying),
], ids=lambda steps: " then ".join(step.__name__ for step in steps))
def test_its_layers_are_rotated_once_and_after_a_purge_ours_are(mended, steps):
    weight, x = torch.randn(96, 256), torch.randn(20, 256)
    for _ in range(3):
        for step in steps:
            step(mended)
        layer = loaded(mended, weight)
        assert layer.weight._layout_cls == "TensorCoreNVFP4Layout"
        assert error(forward_of_the_pack(layer, x), x @ weight.t()) < 0.12
        peel(mended)
        layer = loaded(mended, weight)
        assert layer.weight._layout_cls == "TensorCoreNVFP4LayoutConvRot64"
        assert error(forward_of_the_pack(layer, x), x @ weight.t()) < 0.12


def test_wraps_of_it_that_do_not_see_to_the_rotation_leave_the_layer_to_us(mended):
    with_tidying(mended)
    assert loaded(mended, torch.randn(96, 256)).weight._layout_cls == "TensorCoreNVFP4LayoutConvRot64"


def test_wraps_of_it_that_lie_under_ours_do_not_stand_between(comfy_ops):
    with_arming_after_the_load(comfy_ops)
    put(loader, comfy_ops, "convrot")
    ours = comfy_ops._load_quantized_module
    assert not hswq.owns(torch.nn.Module(), ours, ours)
    # It marks the layer, though.
    assert loaded(comfy_ops, torch.randn(96, 256)).weight._layout_cls == "TensorCoreNVFP4Layout"


def test_a_layer_class_of_its_own_is_its_own():
    layer = type("Conv2d", (torch.nn.Module,), {"_hswq_quant_conv2d": True})()
    assert hswq.owns(layer, None, None)
    assert not hswq.owns(torch.nn.Module(), None, None)


def test_a_closure_without_content_is_no_obstacle():
    def outer():
        def function():
            return later

        if False:
            later = None
        return function

    assert not hswq.owns(torch.nn.Module(), outer(), None)
