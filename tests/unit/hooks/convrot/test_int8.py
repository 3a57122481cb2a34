"""Hook ``convrot-int8`` on stand-ins of comfy.ops that keep, and that drop, the rotation of an INT8 weight."""

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor
from convrot_reference import error, int8_layer, load, put, same_entries

from qpatch.finding import INCOMPATIBLE, NEEDED, NOT_NEEDED
from qpatch.hooks.convrot import int8, kitchen, loader

pytestmark = pytest.mark.usefixtures("has_int8")


@pytest.fixture
def dropping(comfy_ops):
    """comfy.ops as it was for two days: setting a weight quantizes it anew, by its layout's defaults."""
    made = comfy_ops.mixed_precision_ops

    def mixed_precision_ops(*args, **kwargs):
        ops = made(*args, **kwargs)

        def set_weight(self, weight, inplace_update=False, seed=None, return_weight=False, **options):
            quantized = QuantizedTensor.from_float(
                weight, self.layout_type, scale="recalculate", stochastic_rounding=seed)
            self.weight = torch.nn.Parameter(quantized, requires_grad=False)

        ops.Linear.set_weight = set_weight
        return ops

    comfy_ops.mixed_precision_ops = mixed_precision_ops
    return comfy_ops


def linear(ops, weight):
    layer = ops.mixed_precision_ops(compute_dtype=torch.float32).Linear(weight.shape[1], weight.shape[0], bias=False)
    load(layer, int8_layer(weight, 64))
    return layer


def with_outlier():
    """A weight whose INT8 error is ten times as large without the rotation as with it."""
    weight = torch.randn(48, 256) * 0.1
    weight[:, 7] = 20.0
    return weight


def test_where_the_rotation_is_kept_there_is_nothing_to_do(comfy_ops):
    if getattr(QuantizedTensor, "requantize_from_float", None) is None:
        pytest.skip(f"comfy_kitchen {kitchen.version()} cannot keep it")
    assert int8.examine(comfy_ops).verdict == NOT_NEEDED


def test_where_it_is_dropped_the_layer_keeps_it(dropping):
    assert int8.examine(dropping).verdict == NEEDED
    weight = with_outlier()
    stock = linear(dropping, weight)
    stock.set_weight(stock.convert_weight(stock.weight), seed=0)
    assert not stock.weight._params.convrot
    put(int8, dropping, "convrot-int8")
    layer = linear(dropping, weight)
    layer.set_weight(layer.convert_weight(layer.weight) * 2, seed=0)
    assert layer.weight._params.convrot and layer.weight._params.convrot_groupsize == 64
    assert error(layer.weight.dequantize(), weight * 2) < 0.2 * error(stock.weight.dequantize(), weight)
    x = torch.randn(20, 256)
    assert error(layer(x), x @ (weight * 2).t()) < 0.03
    assert int8.examine(dropping).verdict == NOT_NEEDED


def test_the_saved_layer_is_the_file_s(dropping):
    put(int8, dropping, "convrot-int8")
    weight = torch.randn(48, 256)
    assert same_entries(linear(dropping, weight).state_dict(), int8_layer(weight, 64))


def test_it_stands_together_with_the_hook_for_nvfp4_in_either_order(dropping):
    for hooks in ((loader, int8), (int8, loader)):
        patches = [put(hook, dropping, hook.__name__) for hook in hooks]
        assert linear(dropping, torch.randn(48, 256)).layout_type == "TensorWiseINT8LayoutConvRot64"
        for found in reversed(patches):
            for patch in reversed(found):
                patch.revert()


def test_a_comfyui_that_loads_no_int8_has_none_to_lose(comfy_ops):
    del comfy_ops.QUANT_ALGOS["int8_tensorwise"]
    assert int8.examine(comfy_ops).verdict == NOT_NEEDED


def test_a_comfyui_that_drops_it_and_has_no_loader_of_its_own_is_incompatible(dropping):
    load_quantized = dropping._load_quantized_module
    made = dropping.mixed_precision_ops

    def with_loader_inside(*args, **kwargs):
        ops = made(*args, **kwargs)

        def _load_from_state_dict(self, *arguments):
            load_quantized(self, lambda *rest: None, *arguments)

        ops.Linear._load_from_state_dict = _load_from_state_dict
        return ops

    dropping.mixed_precision_ops = with_loader_inside
    del dropping._load_quantized_module
    found = int8.examine(dropping)
    assert found.verdict == INCOMPATIBLE and "no function that loads" in found.reason


def test_a_comfyui_that_cannot_set_the_weight_is_incompatible(comfy_ops, monkeypatch):
    monkeypatch.setattr(comfy_ops, "_load_quantized_module", lambda *args, **kwargs: 1 / 0)
    assert int8.examine(comfy_ops).verdict == INCOMPATIBLE
