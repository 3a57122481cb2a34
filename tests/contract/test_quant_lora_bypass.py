"""Hook quant-lora and the bypass mode of a real ComfyUI (QPATCH_TEST_COMFYUI), both on the same layers."""

import pytest
import quant_lora_twins as twins_of
import torch

comfy = twins_of.real.comfy

pytestmark = pytest.mark.comfyui
#: As a Z-Image file names them: matrices whose bypass needs no rows of a fused one.
LAYERS = ("layers.0.attention.out", "layers.1.feed_forward.w1")


@pytest.fixture(scope="module")
def twins(comfy):
    torch.manual_seed(0)
    # A CPU multiplies it in float, without weight functions, with which ComfyUI loads the whole model anew each time.
    yield twins_of.Twins(comfy, "nvfp4")
    comfy.model_management.unload_all_models()


def bypass(comfy, patcher, file, strength):
    return comfy.sd.load_bypass_lora_for_models(patcher, None, file, strength, 0.0)[0]


def check(twins, patcher, changes):
    base, plain = twins.wanted({}), twins.wanted(changes)
    cosine, ratio = twins_of.agreement(twins.run(patcher) - base, plain - base)
    assert cosine > 0.99 and abs(ratio - 1) < 0.01


def total(*parts):
    """Sum of (changes, strength)."""
    return {path: sum(strength * changes.get(path, 0) for changes, strength in parts) for path in LAYERS}


def test_two_loras_in_bypass_mode_both_act_on_the_model_and_both_go(comfy, twins):
    base = twins.run(twins.patcher)
    (first, one), (second, two) = (twins.lora(8, 0.2, LAYERS) for _ in range(2))
    patcher = bypass(comfy, bypass(comfy, twins.patcher, first, 1.0), second, -0.5)
    for _ in range(2):
        check(twins, patcher, total((one, 1.0), (two, -0.5)))
        assert torch.equal(twins.run(twins.patcher), base)


def test_a_lora_beside_and_one_in_bypass_mode_come_change_and_go_on_the_same_layers(comfy, twins, monkeypatch):
    monkeypatch.setenv("QPATCH_QUANT_LORA", "side")
    base = twins.run(twins.patcher)
    (first, one), (second, two) = (twins.lora(8, 0.2, LAYERS) for _ in range(2))
    passed_by = bypass(comfy, twins.patcher, first, 1.0)
    for strength in (1.0, 0.3, 0.0, -2.0):
        both, _ = comfy.sd.load_lora_for_models(passed_by, None, second, strength, 0.0)
        check(twins, both, total((one, 1.0), (two, strength)))
    check(twins, passed_by, total((one, 1.0)))
    only, _ = comfy.sd.load_lora_for_models(twins.patcher, None, second, 1.0, 0.0)
    check(twins, only, total((two, 1.0)))
    check(twins, bypass(comfy, only, first, 0.5), total((one, 0.5), (two, 1.0)))
    assert torch.equal(twins.run(twins.patcher), base)
    assert not [module for module in twins.patcher.model.modules() if hasattr(module, "qpatch_branch")]
