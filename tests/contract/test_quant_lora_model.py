"""Hook quant-lora: what LoRAs do to the output of a whole model of a real ComfyUI (QPATCH_TEST_COMFYUI)."""

import pytest
import quant_lora_twins as twins_of
import torch

comfy = twins_of.real.comfy
agreement, error = twins_of.agreement, twins_of.error

pytestmark = pytest.mark.comfyui

#: (rank, rms of each LoRA's change in units of the weight's, strength)
EXTREMES = ((1, 0.001, 0.1), (16, 0.02, 1.0), (128, 0.3, 2.0))


@pytest.fixture(scope="module", params=twins_of.FORMATS)
def twins(request, comfy):
    if request.param not in twins_of.available(comfy):
        pytest.skip(f"this ComfyUI has no {request.param}")
    torch.manual_seed(0)
    yield twins_of.Twins(comfy, request.param)
    comfy.model_management.unload_all_models()


@pytest.fixture(autouse=True)
def toggle(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setenv("QPATCH_QUANT_LORA", "side")


def test_effect_of_three_loras_is_theirs_on_the_output_of_the_model(twins):
    start = twins.in_float()
    base, plain = twins.run(start), twins.wanted({})
    for rank, size, strength in EXTREMES:
        loras = [twins.lora(rank, size) for _ in range(3)]
        patcher, changes = twins.with_loras(start, loras, strength)
        cosine, ratio = agreement(twins.run(patcher) - base, twins.wanted(changes) - plain)
        assert cosine > 0.99 and abs(ratio - 1) < 0.01, (rank, size, strength)
    assert torch.equal(twins.run(start), base)


def test_baked_by_comfyui_the_effect_is_the_measured_reason_for_the_hook(twins, monkeypatch):
    monkeypatch.setenv("QPATCH_QUANT_LORA", "bake")
    start = twins.in_float()
    base, plain = twins.run(start), twins.wanted({})
    loras = [twins.lora(16, 0.005) for _ in range(3)]
    patcher, changes = twins.with_loras(start, loras, 1.0)
    cosine, _ = agreement(twins.run(patcher) - base, twins.wanted(changes) - plain)
    assert cosine < 0.8


@pytest.mark.parametrize("rank, size, strength", EXTREMES)
def test_with_the_format_s_own_product_the_output_is_that_of_the_exact_change_beside_it(twins, rank, size, strength):
    """Activations that are quantized as well have a noise of their own, in which a small LoRA's effect on the output is
    hard to see by subtracting. What the format gives is its own product and the change beside it, added exactly."""
    base = twins.run(twins.patcher)
    patcher, changes = twins.with_loras(twins.patcher, [twins.lora(rank, size) for _ in range(3)], strength)
    exact = twins.beside(changes)
    cosine, ratio = agreement(twins.run(patcher) - base, exact - base)
    assert cosine > 0.99 and abs(ratio - 1) < 0.01, (cosine, ratio)


def test_with_the_format_s_own_product_a_lora_costs_no_accuracy_that_the_base_has(twins):
    """Activations that are quantized as well have a noise of their own, in which the effect of a small LoRA on the
    output is lost for anybody who subtracts; so the model with LoRA is compared, not the difference."""
    base = error(twins.run(twins.patcher), twins.wanted({}))
    for rank, size, strength in ((2, 0.001, 0.1), (16, 0.3, 1.0)):
        patcher, changes = twins.with_loras(twins.patcher, [twins.lora(rank, size) for _ in range(3)], strength)
        assert error(twins.run(patcher), twins.wanted(changes)) < max(1.2 * base, 1e-5), (rank, size, strength)
