"""Rotated layouts on a real comfy_kitchen: values, products, and the class in all that is done to a tensor."""

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor, base, get_layout_class, register_layout_op
from convrot_reference import error, rotated

from qpatch.hooks.convrot import config, layouts, rotation
from qpatch.hooks.convrot.basis import relabelled

MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "autograd": torch.enable_grad}


def quantized(weight, layout, **options):
    return QuantizedTensor.from_float(weight, layout, **options)


def nvfp4(group_size):
    return layouts.rotated(config.NVFP4_LAYOUT, group_size)


@pytest.mark.parametrize("size", rotation.GROUP_SIZES)
def test_what_is_stored_is_the_rotated_matrix_and_what_is_read_is_not(size):
    weight = torch.randn(64, 1024)
    tensor = quantized(weight, nvfp4(size))
    plain = error(quantized(weight, config.NVFP4_LAYOUT).dequantize(), weight)
    assert error(tensor.dequantize(), weight) < 1.1 * plain
    assert error(relabelled(tensor, config.NVFP4_LAYOUT).dequantize(), rotated(weight, size)) < 1.1 * plain


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", (1, 20, 500), ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("size", (4, 64, 256))
def test_a_product_with_floats_is_the_product_with_the_weight(size, rows, mode):
    weight, x, bias = torch.randn(96, 256), torch.randn(rows, 256), torch.randn(96)
    tensor = quantized(weight, nvfp4(size))
    values = tensor.dequantize()
    with MODES[mode]():
        assert error(torch.nn.functional.linear(x, tensor), x @ values.t()) < 1e-5
        assert error(torch.nn.functional.linear(x, tensor, bias), x @ values.t() + bias) < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_a_product_of_two_quantized_operands_multiplies_what_is_stored(nvfp4_product, monkeypatch, mode):
    weight, x, bias = torch.randn(96, 256), torch.randn(20, 256), torch.randn(96)
    left, right = quantized(x, nvfp4(64)), quantized(weight, nvfp4(64))
    wanted = left.dequantize() @ right.dequantize().t()
    monkeypatch.setattr(rotation, "_rotate", None)
    with MODES[mode]():
        assert error(torch.nn.functional.linear(left, right), wanted) < 1e-5
        assert error(torch.nn.functional.linear(left, right, bias), wanted + bias) < 1e-5


@pytest.mark.parametrize("other", ("TensorCoreNVFP4Layout", "ConvRot16"))
def test_operands_in_different_bases_are_not_multiplied_as_they_are(other):
    weight, x = torch.randn(96, 256), torch.randn(20, 256)
    right = quantized(weight, nvfp4(64))
    left = quantized(x, nvfp4(16))
    assert error(torch.nn.functional.linear(left, right), left.dequantize() @ right.dequantize().t()) < 1e-5


def test_the_smaller_operand_is_the_one_that_is_rotated(monkeypatch):
    tensor, sizes, rotate = quantized(torch.randn(96, 256), nvfp4(64)), [], rotation._rotate
    monkeypatch.setattr(rotation, "_rotate", lambda x, *rest: sizes.append(x.numel()) or rotate(x, *rest))
    torch.nn.functional.linear(torch.randn(8, 256), tensor)
    torch.nn.functional.linear(torch.randn(800, 256), tensor)
    assert sizes == [8 * 256, 96 * 256]


def test_the_gradient_of_the_input_is_that_of_the_weight_s_values():
    tensor = quantized(torch.randn(96, 256), nvfp4(64))
    found, wanted = torch.randn(20, 256, requires_grad=True), torch.randn(20, 256, requires_grad=True)
    torch.nn.functional.linear(found, tensor, torch.zeros(96)).sum().backward()
    torch.nn.functional.linear(wanted, tensor.dequantize()).sum().backward()
    assert error(found.grad, wanted.grad) < 1e-5


def test_a_transposed_weight_stays_in_its_basis():
    tensor = quantized(torch.randn(96, 256), nvfp4(64))
    values, x = tensor.dequantize(), torch.randn(20, 256)
    assert tensor.t()._layout_cls == tensor._layout_cls
    assert error(tensor.t().dequantize(), values.t()) < 1e-6
    assert error(tensor.t().t().dequantize(), values) < 1e-6
    assert error(x @ tensor.t(), x @ values.t()) < 1e-5
    assert error(torch.randn(20, 96, generator=torch.manual_seed(1)) @ tensor,
                 torch.randn(20, 96, generator=torch.manual_seed(1)) @ values) < 1e-5


@pytest.mark.parametrize("factors", [{}, {"beta": 0.5}, {"alpha": 2}])
@pytest.mark.parametrize("bias", [(96,), (20, 96)])
def test_every_form_of_addmm_is_right(bias, factors):
    tensor, x, bias = quantized(torch.randn(96, 256), nvfp4(64)), torch.randn(20, 256), torch.randn(bias)
    wanted = torch.addmm(bias, x, tensor.dequantize().t(), **factors)
    assert error(torch.addmm(bias, x, tensor.t(), **factors), wanted) < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_a_product_with_the_transposed_weight_is_right(mode):
    tensor, x = quantized(torch.randn(96, 256), nvfp4(64)), torch.randn(20, 96)
    flipped = tensor.t()
    with MODES[mode]():
        assert error(torch.nn.functional.linear(x, flipped), x @ tensor.dequantize()) < 1e-5


@pytest.mark.parametrize("shape", [(60, 256), (33, 20), (96, 48)])
def test_padded_storage_does_not_leak_into_the_values(shape):
    weight = torch.randn(shape)
    tensor = quantized(weight, nvfp4(4))
    assert tensor.dequantize().shape == shape
    assert error(tensor.dequantize(), weight) < 0.12
    x = torch.randn(7, shape[1])
    assert error(torch.nn.functional.linear(x, tensor), x @ tensor.dequantize().t()) < 1e-5


@pytest.mark.parametrize("change", [
    lambda t: t.detach(), lambda t: t.clone(), lambda t: t.to(torch.bfloat16), lambda t: t.contiguous(),
    lambda t: torch.nn.Parameter(t, requires_grad=False), lambda t: torch.empty_like(t).copy_(t),
    lambda t: t.to("cpu", copy=True), lambda t: QuantizedTensor.__tensor_unflatten__(
        *[({name: getattr(t, name) for name in flat[0]}, flat[1]) for flat in [t.__tensor_flatten__()]][0], None, None),
], ids=("detach", "clone", "to dtype", "contiguous", "Parameter", "copy_", "copy", "flatten"))
def test_the_class_survives_what_comfyui_does_to_weights(change):
    weight = torch.randn(64, 256)
    changed = change(quantized(weight, nvfp4(64)))
    assert changed._layout_cls == "TensorCoreNVFP4LayoutConvRot64"
    assert error(changed.dequantize(), weight) < 0.12


@pytest.mark.parametrize("seed", (0, 7))
def test_requantizing_adds_a_delta_in_the_model_s_basis(seed):
    weight, delta = torch.randn(64, 256), torch.randn(64, 256) * 0.5
    tensor = quantized(weight, nvfp4(64))
    made = QuantizedTensor.from_float(
        tensor.dequantize() + delta, tensor._layout_cls, scale="recalculate", stochastic_rounding=seed)
    assert error(made.dequantize(), tensor.dequantize() + delta) < 0.12


def test_reading_and_requantizing_over_and_over_does_not_drift():
    weight = torch.randn(64, 256)
    tensor = quantized(weight, nvfp4(64))
    values = tensor.dequantize()
    for _ in range(5):
        tensor = quantized(tensor.dequantize(), tensor._layout_cls)
    assert error(tensor.dequantize(), values) < 0.02


def test_the_scale_of_an_activation_is_applied_in_the_rotated_basis():
    x = torch.randn(16, 256)
    scale = rotated(x, 64).abs().amax().float() / (448 * 6)
    tensor = quantized(x, nvfp4(64), scale=scale)
    assert torch.equal(tensor._params.scale, scale)
    assert error(tensor.dequantize(), x) < 0.12


def test_a_layout_is_made_once_and_named_after_its_base_and_group_size():
    name = nvfp4(16)
    layout = get_layout_class(name)
    assert nvfp4(16) == name and get_layout_class(name) is layout
    assert name == layout.__name__ == "TensorCoreNVFP4LayoutConvRot16"
    assert (layout.BASE_LAYOUT, layout.GROUP_SIZE) == ("TensorCoreNVFP4Layout", 16)


def test_a_base_that_is_registered_anew_gets_a_layout_of_its_own(monkeypatch):
    before = get_layout_class(nvfp4(16))
    replacement = type("TensorCoreNVFP4Layout", (get_layout_class(config.NVFP4_LAYOUT),), {})
    monkeypatch.setitem(base.LAYOUTS, config.NVFP4_LAYOUT, replacement)
    try:
        assert replacement in get_layout_class(nvfp4(16)).__mro__
    finally:
        base.LAYOUTS[before.__name__] = before


def test_an_impossible_group_size_is_refused():
    with pytest.raises(ValueError, match="group size 32: expected one of 4, 16"):
        nvfp4(32)


def test_an_operator_that_only_the_base_knows_is_answered_from_the_values(monkeypatch):
    later = type("LaterLayout", (get_layout_class(config.NVFP4_LAYOUT),), {})
    monkeypatch.setitem(base.LAYOUTS, "LaterLayout", later)
    register_layout_op(torch.ops.aten.neg.default, later)(lambda qt, args, kwargs: "the stored data, negated")
    tensor = quantized(torch.randn(32, 64), layouts.rotated("LaterLayout", 16))
    assert torch.equal(-tensor, -tensor.dequantize())


def test_a_plain_layout_beside_it_is_untouched(nvfp4_product):
    weight, x = torch.randn(96, 256), torch.randn(20, 256)
    nvfp4(64)
    left, right = quantized(x, config.NVFP4_LAYOUT), quantized(weight, config.NVFP4_LAYOUT)
    assert error(torch.nn.functional.linear(left, right), left.dequantize() @ right.dequantize().t()) < 1e-5
    assert right.t()._layout_cls == config.NVFP4_LAYOUT
