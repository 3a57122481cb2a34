"""Telling a rotated weight from the tensor alone, and working on it in its own basis."""

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor
from convrot_reference import error, rotated

from qpatch.hooks.convrot import config, layouts
from qpatch.hooks.convrot.basis import basis, requantized, stored_values, with_stored_values


def nvfp4(weight, size=64):
    return QuantizedTensor.from_float(weight, layouts.rotated(config.NVFP4_LAYOUT, size))


def own_int8(weight, size=64):
    return QuantizedTensor.from_float(
        weight, config.INT8_LAYOUT, per_channel=True, convrot=True, convrot_groupsize=size)


def kernel(weight, size=16):
    return QuantizedTensor.from_float(weight, layouts.convolution(size))


def test_what_is_not_rotated_has_no_basis():
    plain = QuantizedTensor.from_float(torch.randn(32, 64), config.NVFP4_LAYOUT)
    dense = torch.randn(4, 4)
    for weight in (None, dense, torch.nn.Parameter(dense), plain, torch.zeros(4, dtype=torch.int8)):
        assert basis(weight) is None


@pytest.mark.usefixtures("has_int8")
def test_what_comfy_kitchen_or_a_file_leaves_plain_has_no_basis():
    assert basis(QuantizedTensor.from_float(torch.randn(32, 64), config.INT8_LAYOUT)) is None
    assert basis(kernel(torch.randn(8, 30, 3, 3), 1)) is None


def test_a_rotated_weight_tells_its_basis_also_as_a_parameter():
    weight = torch.nn.Parameter(nvfp4(torch.randn(32, 256)), requires_grad=False)
    found = basis(weight)
    assert (found.group_size, found.layout, found.base, found.axis) == (
        64, "TensorCoreNVFP4LayoutConvRot64", "TensorCoreNVFP4Layout", -1)
    x = torch.randn(3, 5, 7, 256)
    assert torch.allclose(found.rotate(x).double(), rotated(x, 64), atol=1e-5)


@pytest.mark.usefixtures("has_int8")
def test_int8_weights_tell_their_basis():
    assert basis(own_int8(torch.randn(32, 256))).group_size == 64
    found = basis(kernel(torch.randn(8, 32, 3, 3)))
    image = torch.randn(2, 32, 5, 5)
    assert found.axis == 1
    assert torch.allclose(found.rotate(image).double(), rotated(image, 16, axis=1), atol=1e-5)


def test_other_layouts_that_comfy_kitchen_rotates_tell_their_basis():
    try:
        weight = QuantizedTensor.from_float(torch.randn(64, 256), "TensorCoreConvRotW4A4Layout", convrot_groupsize=64)
    except KeyError:
        pytest.skip("this comfy_kitchen has no ConvRot W4A4 layout")
    assert basis(weight).group_size == 64
    assert stored_values(weight) is None


CASES = {"nvfp4": (nvfp4, (60, 256), -1), "int8": (own_int8, (48, 256), -1), "kernel": (kernel, (24, 32, 3, 3), 1)}


@pytest.mark.parametrize("case", CASES)
def test_the_stored_values_are_the_rotated_weight(case, request):
    make, shape, axis = CASES[case]
    if case != "nvfp4":
        request.getfixturevalue("has_int8")
    weight = torch.randn(shape)
    tensor = make(weight).to(torch.bfloat16)
    values = stored_values(tensor)
    assert values.dtype == torch.float32 and values.shape == shape
    assert error(values, rotated(weight, basis(tensor).group_size, axis)) < 0.12


@pytest.mark.parametrize("case", CASES)
def test_a_delta_added_in_the_rotated_basis_is_that_delta(case, request):
    make, shape, axis = CASES[case]
    if case != "nvfp4":
        request.getfixturevalue("has_int8")
    weight, delta = torch.randn(shape), torch.randn(shape)
    tensor = make(weight).to(torch.bfloat16)
    made = with_stored_values(tensor, stored_values(tensor) + rotated(delta, basis(tensor).group_size, axis).float())
    assert made._layout_cls == tensor._layout_cls and made.dtype == torch.bfloat16
    assert made._params.scale.shape == tensor._params.scale.shape
    assert error(made.dequantize(), tensor.dequantize() + delta) < 0.12
    assert basis(made) == basis(tensor)


def test_requantizing_works_with_a_comfy_kitchen_that_has_no_word_for_it():
    weight = torch.randn(48, 256)
    made = requantized(nvfp4(weight).to(torch.bfloat16), weight * 2)
    assert made.dtype == torch.bfloat16
    assert error(made.dequantize(), weight * 2) < 0.12
