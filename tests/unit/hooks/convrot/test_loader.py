"""Hook ``convrot`` on a stand-in of comfy.ops: loading, running, LoRA and saving of NVFP4 ConvRot layers."""

import json
import logging
import sys

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor, base, get_layout_class
from convrot_reference import (
    error,
    int8_layer,
    load,
    nvfp4_layer,
    plain_error,
    put,
    rotated,
    same_entries,
    settings_tensor,
)

from qpatch.finding import INCOMPATIBLE, NEEDED, NOT_NEEDED
from qpatch.hooks.convrot import adoption, kitchen, loader

MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "autograd": torch.enable_grad}


@pytest.fixture
def mended(comfy_ops):
    put(loader, comfy_ops, "convrot")
    return comfy_ops


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(adoption, "_said", set())


def linear(ops, entries, shape, **options):
    """A Linear of ``shape`` (out, in) of ``ops`` with ``entries`` loaded."""
    made = ops.mixed_precision_ops(compute_dtype=torch.float32, **options)
    layer = made.Linear(shape[1], shape[0], bias="bias" in entries)
    assert load(layer, entries) == ([], [])
    return layer


def test_stock_comfyui_gives_noise(comfy_ops):
    weight, x = torch.randn(96, 256), torch.randn(20, 256)
    layer = linear(comfy_ops, nvfp4_layer(weight, 64), weight.shape, disabled={"nvfp4"})
    assert error(layer(x), x @ weight.t()) > 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("native", (True, False), ids=("quantized product", "full precision"))
@pytest.mark.parametrize("size", (4, 16, 64, 256))
def test_a_layer_runs_with_the_error_of_a_plain_one(mended, nvfp4_product, size, native, mode):
    weight, x, bias = torch.randn(96, 256), torch.randn(2, 20, 256), torch.randn(96)
    entries = {**nvfp4_layer(weight, size), "bias": bias}
    layer = linear(mended, entries, weight.shape, disabled=set() if native else {"nvfp4"})
    # Two independently quantized operands where the product is quantized as well.
    bound = plain_error(weight) if not native else (plain_error(weight) ** 2 + plain_error(x[0]) ** 2) ** 0.5
    with MODES[mode]():
        assert error(layer(x), x @ weight.t() + bias) < 1.1 * bound


def as_bytes(text):
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize("form", [
    lambda s: s, json.dumps, lambda s: json.dumps(s).encode(), lambda s: as_bytes(json.dumps(json.dumps(s))),
    lambda s: as_bytes(json.dumps({"format": "nvfp4", "params": {k: v for k, v in s.items() if k != "format"}})),
], ids=("dict", "string", "bytes", "encoded twice", "under params"))
def test_the_configuration_is_read_in_every_form(mended, form):
    weight = torch.randn(32, 256)
    settings = {"format": "nvfp4", "convrot": True, "convrot_groupsize": 64}
    layer = linear(mended, {**nvfp4_layer(weight, 64), "comfy_quant": form(settings)}, weight.shape)
    assert error(layer.weight.dequantize(), weight) < 0.12


def test_one_file_may_hold_every_kind_of_layer(mended, has_int8, caplog):
    model = torch.nn.ModuleDict({name: mended.mixed_precision_ops(compute_dtype=torch.float32).Linear(256, 48)
                                 for name in ("rotated", "plain_nvfp4", "int8", "unquantized")})
    weight, bias = torch.randn(48, 256), torch.zeros(48)
    plain = QuantizedTensor.from_float(weight, "TensorCoreNVFP4Layout").state_dict("weight")
    layers = {
        "rotated": nvfp4_layer(weight, 64), "int8": int8_layer(weight, 64), "unquantized": {"weight": weight},
        "plain_nvfp4": {**plain, "comfy_quant": settings_tensor(format="nvfp4")},
    }
    entries = {f"{name}.{key}": value
               for name, layer in layers.items() for key, value in {**layer, "bias": bias}.items()}
    model.load_state_dict(entries)
    x = torch.randn(20, 256)
    for name, layer in model.items():
        values = layer.weight.dequantize() if isinstance(layer.weight, QuantizedTensor) else layer.weight
        assert error(values, weight) < 0.12, name
        layer._full_precision_mm = True
        assert error(layer(x), x @ weight.t()) < 0.15, name
    assert same_entries(model.state_dict(), entries)
    assert not caplog.records


def test_a_layer_that_comfyui_puts_into_a_layout_of_its_own_is_its_own(mended, monkeypatch):
    later = type("LaterLayout", (get_layout_class("TensorCoreNVFP4Layout"),), {})
    monkeypatch.setitem(base.LAYOUTS, "LaterLayout", later)
    mended.QUANT_ALGOS["nvfp4"]["comfy_tensor_layout"] = "LaterLayout"
    layer = linear(mended, nvfp4_layer(torch.randn(96, 256), 64), (96, 256))
    assert layer.layout_type == layer.weight._layout_cls == "LaterLayout"


@pytest.mark.parametrize("input_scale", (True, False))
def test_a_saved_layer_is_the_file_s_layer_and_loads_again(mended, input_scale):
    weight = torch.randn(96, 256)
    entries = {**nvfp4_layer(weight, 64), "bias": torch.randn(96)}
    if input_scale:
        entries["input_scale"] = torch.tensor(0.002)
    first = linear(mended, entries, weight.shape)
    saved = first.state_dict()
    assert same_entries(saved, entries)
    second = linear(mended, saved, weight.shape)
    assert torch.equal(second.weight.dequantize(), first.weight.dequantize())
    assert second.weight._layout_cls == first.weight._layout_cls == second.layout_type


def test_the_input_scale_of_the_file_scales_the_rotated_activation(mended, nvfp4_product):
    weight, x = torch.randn(96, 256), torch.randn(20, 256)
    scale = rotated(x, 64).abs().amax().float() / (448 * 6)
    layer = linear(mended, {**nvfp4_layer(weight, 64), "input_scale": scale}, weight.shape)
    assert error(layer(x), x @ weight.t()) < 0.15


def test_stock_comfyui_loses_the_declaration_when_it_saves(comfy_ops):
    layer = linear(comfy_ops, nvfp4_layer(torch.randn(96, 256), 64), (96, 256))
    assert "convrot" not in json.loads(bytes(layer.state_dict()["comfy_quant"].tolist()))


@pytest.mark.parametrize("seed", (0, 11))
def test_lora_is_baked_in_the_model_s_basis(mended, seed):
    weight, delta = torch.randn(96, 256), torch.randn(96, 4) @ torch.randn(4, 256) * 0.3
    layer = linear(mended, nvfp4_layer(weight, 64), weight.shape)
    layer.set_weight(layer.convert_weight(layer.weight) + delta, seed=seed)
    plain = QuantizedTensor.from_float(
        QuantizedTensor.from_float(weight, "TensorCoreNVFP4Layout").dequantize() + delta, "TensorCoreNVFP4Layout")
    assert error(layer.weight.dequantize(), weight + delta) < 1.1 * error(plain.dequantize(), weight + delta)


def test_lora_in_and_out_ten_times_gives_the_same_bits_each_time(mended):
    weight, delta, x = torch.randn(96, 256), torch.randn(96, 256) * 0.1, torch.randn(20, 256)
    layer = linear(mended, nvfp4_layer(weight, 64), weight.shape, disabled={"nvfp4"})
    original, without, seen = layer.weight, layer(x), []
    for _ in range(10):
        layer.set_weight(layer.convert_weight(layer.weight) + delta, seed=5)
        seen.append(layer(x))
        layer.weight = original
        assert torch.equal(layer(x), without)
    assert all(torch.equal(seen[0], other) for other in seen)


def test_the_logical_shape_of_the_file_corrects_a_layer_built_from_the_packed_one(mended):
    weight, x = torch.randn(60, 256), torch.randn(8, 256)
    entries = nvfp4_layer(weight, 64, orig_shape=[60, 256])
    layer = linear(mended, entries, (64, 128), disabled={"nvfp4"})
    assert (layer.out_features, layer.in_features) == (60, 256)
    assert error(layer(x), x @ weight.t()) < 0.12
    # Padding cannot be told from the storage, so the shape is written back.
    assert same_entries(layer.state_dict(), entries)


def test_a_logical_shape_that_the_storage_contradicts_is_not_believed(mended, caplog):
    weight = torch.randn(64, 256)
    with caplog.at_level(logging.WARNING):
        layer = linear(mended, nvfp4_layer(weight, 64, orig_shape=[64, 512]), weight.shape)
    assert "comfy_quant says (64, 512), which is stored as (64, 256), but the file has (64, 128)" in caplog.text
    assert error(layer.weight.dequantize(), weight) < 0.12


@pytest.mark.parametrize(("size", "reason"), [
    (32, "its ConvRot group size is 32, expected one of 4, 16, 64, 256, 1024"),
    (64, "its ConvRot group size 64 does not divide its 48 inputs"),
    ("many", "left to ComfyUI: invalid literal for int"),
])
def test_a_layer_that_cannot_be_what_it_says_stays_stock_and_the_log_says_it_once(mended, caplog, size, reason):
    entries = {**nvfp4_layer(torch.randn(32, 48), 16),
               "comfy_quant": settings_tensor(format="nvfp4", convrot=True, convrot_groupsize=size)}
    with caplog.at_level(logging.WARNING):
        layers = [linear(mended, entries, (32, 48)) for _ in range(3)]
    assert all(layer.layout_type == "TensorCoreNVFP4Layout" for layer in layers)
    assert caplog.text.count(reason) == 1


def test_nothing_of_ours_stops_a_model_from_loading(mended, caplog, monkeypatch):
    weight = torch.randn(96, 256)
    monkeypatch.setattr(adoption.layouts, "rotated", lambda *arguments: 1 / 0)
    with caplog.at_level(logging.WARNING):
        layer = linear(mended, nvfp4_layer(weight, 64), weight.shape)
    assert layer.layout_type == "TensorCoreNVFP4Layout"
    assert "layer (unnamed) stays un-rotated and will give noise: division by zero" in caplog.text
    monkeypatch.setenv("QPATCH_STRICT", "1")
    with pytest.raises(ZeroDivisionError):
        linear(mended, nvfp4_layer(weight, 64), weight.shape)


def test_a_layer_without_configuration_is_left_alone(mended):
    weight = torch.randn(16, 16)
    layer = linear(mended, {"weight": weight}, weight.shape)
    assert torch.equal(layer.weight, weight) and not hasattr(layer, "layout_type")


def test_a_layer_of_another_format_that_declares_a_rotation_is_left_to_comfyui(mended, has_int8):
    layer = linear(mended, int8_layer(torch.randn(48, 256), 64), (48, 256))
    assert layer.layout_type == layer.weight._layout_cls == "TensorWiseINT8Layout"


def test_the_finding_is_made_by_loading_a_small_layer(comfy_ops):
    assert loader.examine(comfy_ops).verdict == NEEDED
    put(loader, comfy_ops, "convrot")
    # A ComfyUI that does what the hook does has no need of it.
    found = loader.examine(comfy_ops)
    assert found.verdict == NOT_NEEDED and "by itself" in found.reason


def test_probing_moves_no_generator_of_random_numbers(comfy_ops):
    before = torch.get_rng_state()
    loader.examine(comfy_ops)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_comfyui_whose_loader_fails_on_the_small_layer_is_left_alone(comfy_ops, monkeypatch):
    monkeypatch.setattr(comfy_ops, "_load_quantized_module", lambda *args, **kwargs: 1 / 0)
    found = loader.examine(comfy_ops)
    assert found.verdict == INCOMPATIBLE and "ZeroDivisionError" in found.reason


def test_a_comfyui_without_nvfp4_is_incompatible(comfy_ops):
    del comfy_ops.QUANT_ALGOS["nvfp4"]
    assert loader.examine(comfy_ops).verdict == INCOMPATIBLE


def test_comfy_kitchen_outside_the_known_range_is_incompatible(comfy_ops, monkeypatch):
    monkeypatch.setattr(kitchen, "version", lambda: "0.2.9")
    found = loader.examine(comfy_ops)
    assert found.verdict == INCOMPATIBLE
    assert found.reason == "comfy_kitchen 0.2.9 is older than 0.2.10, the first release that is known to work"
    monkeypatch.setattr(kitchen, "version", lambda: "9.0")
    monkeypatch.delattr("comfy_kitchen.tensor.register_layout_op")
    assert "comfy_kitchen 9.0 has no register_layout_op" in loader.examine(comfy_ops).reason


def test_without_comfy_kitchen_it_is_incompatible(comfy_ops, monkeypatch):
    monkeypatch.setitem(sys.modules, "comfy_kitchen.tensor", None)
    assert "cannot be imported" in loader.examine(comfy_ops).reason
