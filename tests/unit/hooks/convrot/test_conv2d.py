"""Hook ``convrot-conv2d`` on a stand-in of comfy.ops: INT8 convolutions, rotated and plain."""

import logging
import re

import pytest
import torch
from convrot_reference import error, int8_layer, put, same_entries, settings_tensor

from qpatch.finding import INCOMPATIBLE, NEEDED, NOT_NEEDED
from qpatch.hooks.convrot import adoption, conv2d, loader

pytestmark = pytest.mark.usefixtures("has_int8")


@pytest.fixture
def mended(comfy_ops):
    put(conv2d, comfy_ops, "convrot-conv2d")
    return comfy_ops


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(adoption, "_said", set())


def plain_layer(weight):
    """An INT8 convolution as a file has it whose channels no group size divides: one scale, not rotated."""
    scale = weight.abs().max() / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale,
            "comfy_quant": settings_tensor(format="int8_tensorwise")}


def network(ops, *shapes):
    made = ops.mixed_precision_ops(compute_dtype=torch.float32)
    return torch.nn.Sequential(*(made.Conv2d(shape[1], shape[0], shape[2], padding=shape[2] // 2) for shape in shapes))


def entries_of(*layers):
    return {f"{index}.{key}": value for index, layer in enumerate(layers) for key, value in layer.items()}


@pytest.fixture
def sdxl_like():
    """(weights, biases, the entries of the file) of a rotated, a plain and an unquantized convolution."""
    weights = torch.randn(24, 32, 3, 3), torch.randn(30, 24, 3, 3), torch.randn(8, 30, 1, 1)
    biases = torch.randn(24), torch.randn(30), torch.randn(8)
    layers = int8_layer(weights[0], 16), plain_layer(weights[1]), {"weight": weights[2]}
    return weights, biases, entries_of(*({**layer, "bias": bias} for layer, bias in zip(layers, biases)))


def run(image, weights, biases):
    for weight, bias in zip(weights, biases):
        image = torch.nn.functional.conv2d(image, weight, bias, padding=weight.shape[2] // 2)
    return image


def test_stock_comfyui_takes_the_integers_for_the_weight(comfy_ops):
    weight = torch.randn(24, 32, 3, 3)
    model = network(comfy_ops, weight.shape)
    model.load_state_dict(entries_of({**int8_layer(weight, 16), "bias": torch.zeros(24)}), strict=False)
    image = torch.randn(2, 32, 12, 12)
    assert error(model(image), run(image, [weight], [None])) > 1


@pytest.mark.parametrize("assign", (True, False))
def test_a_file_of_all_kinds_loads_strictly_and_runs(mended, sdxl_like, assign):
    weights, biases, entries = sdxl_like
    model = network(mended, *(weight.shape for weight in weights))
    model.load_state_dict(entries, strict=True, assign=assign)
    for side in (4, 24):
        image = torch.randn(2, 32, side, side)
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            with mode():
                assert error(model(image), run(image, weights, biases)) < 0.02


def test_it_is_saved_as_it_was_loaded_and_loads_again(mended, sdxl_like):
    weights, _, entries = sdxl_like
    model, again = (network(mended, *(weight.shape for weight in weights)) for _ in range(2))
    model.load_state_dict(entries)
    assert same_entries(model.state_dict(), entries)
    again.load_state_dict(model.state_dict())
    image = torch.randn(2, 32, 8, 8)
    assert torch.equal(again(image), model(image))


def test_a_plain_convolution_stays_plain_where_the_hook_for_nvfp4_stands_too(mended, sdxl_like):
    put(loader, mended, "convrot")
    weights, _, entries = sdxl_like
    model = network(mended, *(weight.shape for weight in weights))
    model.load_state_dict(entries)
    assert same_entries(model.state_dict(), entries)


@pytest.mark.parametrize("shape", [(24,), (24, 1), (24, 1, 1, 1)])
def test_scales_of_any_shape_are_taken(mended, shape):
    weight = torch.randn(24, 32, 3, 3)
    entries = {**int8_layer(weight, 16), "bias": torch.zeros(24)}
    entries["weight_scale"] = entries["weight_scale"].reshape(shape)
    model = network(mended, weight.shape)
    model.load_state_dict(entries_of(entries))
    assert model[0].weight._params.scale.shape == (24, 1, 1, 1)
    assert error(model[0].weight.dequantize(), weight) < 0.01


def test_lora_is_baked_in_the_model_s_basis(mended, sdxl_like):
    weights, _, entries = sdxl_like
    model = network(mended, *(weight.shape for weight in weights))
    model.load_state_dict(entries)
    for layer, weight in zip(model, weights):
        delta = torch.randn_like(weight) * 0.3
        layer.set_weight(layer.convert_weight(layer.weight) + delta, seed=3)
        assert error(layer.weight.dequantize(), weight + delta) < 0.03
        if layer is model[1]:
            break


def test_the_layer_moves_and_changes_dtype_with_its_model(mended, sdxl_like):
    weights, biases, entries = sdxl_like
    model = network(mended, *(weight.shape for weight in weights))
    model.load_state_dict(entries)
    model.to(torch.float64).to("cpu")
    assert model[0].weight.dtype == torch.float64 and model[0].layout_type == model[0].weight._layout_cls
    image = torch.randn(2, 32, 8, 8)
    assert error(model(image.double()), run(image, weights, biases)) < 0.02


@pytest.mark.parametrize(("change", "reason"), [
    ({"weight_scale": torch.ones(5)}, "it has 5 scales, expected 1 or 24"),
    ({"weight": torch.zeros(24, 16, 3, 3, dtype=torch.int8)}, r"int8 \(24, 16, 3, 3\), expected int8 \(24, 32, 3, 3\)"),
    ({"comfy_quant": settings_tensor(format="int8_tensorwise", convrot=True, convrot_groupsize=64)},
     "64 does not divide its 32"),
])
def test_what_does_not_fit_is_left_to_comfyui_and_the_log_says_why(mended, caplog, change, reason):
    weight = torch.randn(24, 32, 3, 3)
    model = network(mended, weight.shape)
    with caplog.at_level(logging.WARNING):
        try:
            entries = {**int8_layer(weight, 16), "bias": torch.zeros(24), **change}
            model.load_state_dict(entries_of(entries), strict=False)
        except RuntimeError as error:
            assert "size mismatch" in str(error)
    assert re.search(reason, caplog.text)
    assert getattr(model[0], "layout_type", None) is None


def test_a_configuration_that_cannot_be_read_is_left_to_comfyui(mended, caplog):
    weight = torch.randn(24, 32, 3, 3)
    model = network(mended, weight.shape)
    entries = {"weight": weight, "bias": torch.zeros(24), "comfy_quant": torch.tensor([123, 34], dtype=torch.uint8)}
    with caplog.at_level(logging.WARNING):
        model.load_state_dict(entries_of(entries), strict=False)
    assert "comfy_quant is not JSON" in caplog.text
    assert torch.equal(model[0].weight, weight)


def test_a_convolution_of_another_format_is_left_to_comfyui(mended):
    weight = torch.randn(24, 32, 3, 3)
    model = network(mended, weight.shape)
    entries = {"weight": weight, "bias": torch.zeros(24), "comfy_quant": settings_tensor(format="float8_e4m3fn")}
    model.load_state_dict(entries_of(entries), strict=False)
    assert torch.equal(model[0].weight, weight)


def test_a_pack_that_puts_its_own_convolution_there_keeps_it(mended):
    made = mended.mixed_precision_ops

    def wrapped(*args, **kwargs):
        ops = made(*args, **kwargs)
        ops.Conv2d = torch.nn.Conv2d
        return ops

    mended.mixed_precision_ops = wrapped
    assert mended.mixed_precision_ops().Conv2d is torch.nn.Conv2d


def test_the_finding_is_made_by_running_a_small_convolution(comfy_ops):
    assert conv2d.examine(comfy_ops).verdict == NEEDED
    put(conv2d, comfy_ops, "convrot-conv2d")
    assert conv2d.examine(comfy_ops).verdict == NOT_NEEDED


def test_a_quantized_convolution_of_comfyui_s_own_is_not_replaced(comfy_ops):
    made = comfy_ops.mixed_precision_ops

    def with_own(*args, **kwargs):
        ops = made(*args, **kwargs)
        ops.Conv2d = type("Conv2d", (ops.Conv2d,), {})
        return ops

    comfy_ops.mixed_precision_ops = with_own
    found = conv2d.examine(comfy_ops)
    assert found.verdict == INCOMPATIBLE and "of its own" in found.reason


def test_a_comfyui_without_int8_is_incompatible(comfy_ops, old_comfy_ops):
    del comfy_ops.QUANT_ALGOS["int8_tensorwise"]
    assert conv2d.examine(comfy_ops).verdict == INCOMPATIBLE
    assert "0.27 is the first release" in conv2d.examine(old_comfy_ops).reason
