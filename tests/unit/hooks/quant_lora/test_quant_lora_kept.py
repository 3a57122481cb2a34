"""Hook quant-lora: the predicted kept share against what comfy_kitchen's own stochastic rounding really keeps.

NVFP4, MXFP8 and FP8 round stochastically in ComfyUI only: their prediction is checked against a real ComfyUI in
tests/contract/test_quant_lora.py, and here their step sizes.
"""

import math

import pytest
import torch

kitchen = pytest.importorskip("comfy_kitchen.tensor")

from qpatch.hooks.quant_lora import kept, steps
from qpatch.hooks.quant_lora.splitting import split

OUT, IN, RMS = 256, 512, 0.03
STOCHASTIC = {
    "int8": ("TensorWiseINT8Layout", {}),
    "int8 per channel": ("TensorWiseINT8Layout", {"per_channel": True}),
    "int8 convrot": ("TensorWiseINT8Layout", {"per_channel": True, "convrot": True}),
    "convrot w4a4": ("TensorCoreConvRotW4A4Layout", {}),
    "w4a8": ("AsymW4A8Int8Layout", {}),
}
NEAREST = {
    "nvfp4": ("TensorCoreNVFP4Layout", {}),
    "mxfp8": ("TensorCoreMXFP8Layout", {}),
    "e4m3": ("TensorCoreFP8Layout", {"scale": "recalculate"}),
    "e5m2": ("TensorCoreFP8Layout", {"scale": "recalculate", "dtype": torch.float8_e5m2}),
}

#: Largest difference between a predicted and a measured kept share, both between 0 and 1; from 0.8 on, where
#: the choice is made, and below.
CLOSE, ROUGH = 0.03, 0.1


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def quantize(table, name):
    layout, settings = table[name]
    if layout not in kitchen.__dict__:
        pytest.skip(f"this comfy_kitchen has no {layout}")
    weight = torch.randn(OUT, IN) * RMS
    return kitchen.QuantizedTensor.from_float(weight, layout, **settings), weight


def low_rank(size):
    delta = torch.randn(OUT, 16) @ torch.randn(16, IN)
    return delta * size * RMS / delta.std()


@pytest.mark.parametrize("size", (0.001, 0.005, 0.025, 0.1, 0.3))
@pytest.mark.parametrize("name", STOCHASTIC)
def test_predicted_share_is_the_measured_cosine(name, size):
    tensor, _ = quantize(STOCHASTIC, name)
    base, delta = tensor.dequantize(), low_rank(size)
    baked = tensor.requantize_from_float(base + delta, scale="recalculate", stochastic_rounding=77).dequantize() - base
    measured = (torch.sum(baked * delta) / (baked.norm() * delta.norm())).item()
    predicted = kept.predict(tensor, delta.norm().item(), OUT * IN)
    assert abs(predicted - measured) < (CLOSE if measured > 0.8 else ROUGH)


@pytest.mark.parametrize("name", [*STOCHASTIC, *NEAREST])
def test_steps_explain_the_error_of_rounding_to_nearest(name):
    tensor, weight = quantize({**STOCHASTIC, **NEAREST}, name)
    error = (tensor.dequantize().float() - weight).square().mean().sqrt().item()
    assert steps.of(tensor).rms == pytest.approx(error * math.sqrt(12), rel=0.2)


def test_the_share_of_stochastic_rounding_on_a_grid_is_that_of_a_simulation():
    """Independent of all formats: integers, a Gaussian delta, rounding up with the probability of the fraction."""
    values = torch.randint(-20, 20, (400_000,)).double()
    for rms in (0.02, 0.1, 0.3, 1.0, 3.0):
        delta = torch.randn(values.shape, dtype=torch.float64) * rms
        rounded = torch.floor(values + delta + torch.rand(values.shape, dtype=torch.float64)) - values
        measured = (rounded @ delta / (rounded.norm() * delta.norm())).item()
        assert kept.share(1.0, rms, on_grid=True) == pytest.approx(measured, abs=0.01)


def test_the_terms_of_slices_count_by_their_own_rows():
    tensor, _ = quantize(STOCHASTIC, "int8")

    class Adapter:
        name, weights = "lora", (torch.randn(OUT // 4, 2) * 0.001, torch.randn(2, IN), None, None, None, None)

    part = split([(2.0, Adapter(), 1.0, (0, 0, OUT // 4), None)], (OUT, IN))
    delta = 2.0 * Adapter.weights[0].double() @ Adapter.weights[1].double()
    wanted = kept.share(steps.of(tensor).rms, delta.square().mean().sqrt().item(), on_grid=True)
    assert kept.of_terms(tensor, part.placed) == pytest.approx(wanted, rel=1e-3)


def test_a_format_nobody_knows_gets_no_prediction_and_one_made_offline_keeps_nothing():
    class Unknown:
        _layout_cls, _qdata, _params, shape = "SomebodysLayout", None, None, (OUT, IN)

    class Offline(Unknown):
        _layout_cls = "TensorCoreSVDQuantW4A4Layout"

    assert kept.predict(Unknown(), 1.0, 10) is None and kept.predict(Offline(), 1.0, 10) == 0.0
