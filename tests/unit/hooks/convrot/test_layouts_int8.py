"""The rotated INT8 layouts, of matrices and of convolutions."""

import dataclasses

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor, get_layout_class
from convrot_reference import error, int8_layer, rotated

from qpatch.hooks.convrot import config, layouts, rotation

pytestmark = pytest.mark.usefixtures("has_int8")
MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "autograd": torch.enable_grad}


def matrix(weight, size):
    return QuantizedTensor.from_float(weight, layouts.rotated(config.INT8_LAYOUT, size))


def kernel(weight, size, **options):
    return QuantizedTensor.from_float(weight, layouts.convolution(size), **options)


def test_a_matrix_is_stored_as_comfy_kitchen_stores_it_with_convrot():
    weight = torch.randn(48, 256)
    found, wanted = matrix(weight, 64), int8_layer(weight, 64)
    assert (found._qdata.int() - wanted["weight"].int()).abs().max() <= 1
    assert torch.allclose(found._params.scale, wanted["weight_scale"], rtol=1e-5)
    assert found._params.convrot and found._params.convrot_groupsize == 64


def test_options_that_would_drop_the_rotation_are_overruled():
    weight = torch.randn(48, 256)
    tensor = QuantizedTensor.from_float(
        weight, layouts.rotated(config.INT8_LAYOUT, 64), scale="recalculate", stochastic_rounding=3,
        inplace_ops=True, is_weight=True, per_channel=False, convrot=False)
    assert tensor._params.convrot and tensor._params.scale.numel() == 48
    assert error(tensor.dequantize(), weight) < 0.015


@pytest.mark.parametrize("mode", MODES)
def test_a_product_with_a_matrix_is_comfy_kitchen_s_own(mode):
    weight, x, bias = torch.randn(48, 256), torch.randn(20, 256), torch.randn(48)
    tensor = matrix(weight, 64)
    own = QuantizedTensor(tensor._qdata, config.INT8_LAYOUT, tensor._params)
    with MODES[mode]():
        assert torch.equal(torch.nn.functional.linear(x, tensor, bias), torch.nn.functional.linear(x, own, bias))


def test_a_transposed_matrix_keeps_its_layout():
    tensor = matrix(torch.randn(48, 256), 64)
    assert tensor.t()._layout_cls == tensor._layout_cls
    assert error(tensor.t().dequantize(), tensor.dequantize().t()) < 1e-6


@pytest.mark.parametrize(("size", "shape"), [
    (1, (24, 30, 3, 3)), (4, (24, 36, 3, 3)), (16, (8, 32, 1, 1)), (64, (8, 64, 5, 3))])
def test_a_kernel_is_rotated_along_its_input_channels(size, shape):
    weight = torch.randn(shape)
    tensor = kernel(weight, size)
    layout = get_layout_class(tensor._layout_cls)
    assert tensor._qdata.shape == shape and tensor._params.scale.shape == (shape[0], 1, 1, 1)
    wanted = weight if size == 1 else rotated(weight, size, axis=1)
    assert error(layout.stored(tensor._qdata, tensor._params), wanted) < 0.01
    assert error(tensor.dequantize(), weight) < 0.01


def test_a_kernel_is_read_from_a_file_as_it_was_written():
    weight = torch.randn(24, 32, 3, 3)
    entries, name = int8_layer(weight, 16), layouts.convolution(16)
    params = get_layout_class(name).Params(scale=entries["weight_scale"], orig_dtype=torch.float32,
                                           orig_shape=(24, 32, 3, 3), convrot=True, convrot_groupsize=16)
    tensor = QuantizedTensor(entries["weight"], name, params)
    assert error(tensor.dequantize(), weight) < 0.01
    assert torch.equal(tensor.state_dict("weight")["weight_scale"], entries["weight_scale"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", (3, 40), ids=("small image", "large image"))
@pytest.mark.parametrize("options", [
    {}, {"padding": 1}, {"stride": 2, "padding": (1, 0)}, {"groups": 2}, {"dilation": 2, "padding": 2}])
def test_a_convolution_is_that_of_the_kernel_s_values(options, side, mode):
    channels = 32 // options.get("groups", 1)
    tensor, bias = kernel(torch.randn(24, channels, 3, 3), 16), torch.randn(24)
    image = torch.randn(2, 32, side + 2, side + 2)
    wanted = torch.nn.functional.conv2d(image, tensor.dequantize(), bias, **options)
    with MODES[mode]():
        assert error(torch.nn.functional.conv2d(image, tensor, bias, **options), wanted) < 1e-5


def test_the_smaller_of_image_and_kernel_is_rotated(monkeypatch):
    tensor, sizes, rotate = kernel(torch.randn(24, 32, 3, 3), 16), [], rotation._rotate
    monkeypatch.setattr(rotation, "_rotate", lambda x, *rest: sizes.append(x.numel()) or rotate(x, *rest))
    with torch.no_grad():
        torch.nn.functional.conv2d(torch.randn(1, 32, 4, 4), tensor)
        torch.nn.functional.conv2d(torch.randn(1, 32, 40, 40), tensor)
    assert sizes == [32 * 16, 24 * 32 * 9]


@pytest.mark.parametrize("per_channel", (True, False))
def test_requantizing_a_kernel_keeps_its_kind_of_scales(per_channel):
    weight = torch.randn(24, 30, 3, 3)
    tensor = kernel(weight, 1, per_channel=per_channel)
    options = get_layout_class(tensor._layout_cls).requantize_kwargs(tensor)
    made = QuantizedTensor.from_float(weight + 0.1, tensor._layout_cls, scale="recalculate", **options)
    assert made._params.scale.shape == tensor._params.scale.shape
    assert error(made.dequantize(), weight + 0.1) < 0.02
    torch.empty_like(tensor).copy_(made)


def test_a_kernel_with_one_scale_in_any_shape_is_read():
    tensor = kernel(torch.randn(24, 30, 3, 3), 1, per_channel=False)
    for shape in ((), (1,), (1, 1, 1, 1)):
        params = dataclasses.replace(tensor._params, scale=tensor._params.scale.reshape(shape))
        again = QuantizedTensor(tensor._qdata, tensor._layout_cls, params)
        assert torch.equal(again.dequantize(), tensor.dequantize())
