"""Hook quant-lora in a real ComfyUI (QPATCH_TEST_COMFYUI): changes of every kind that conditioning hooks schedule."""

import importlib

import pytest
import torch
from quant_lora_layers import IN, OUT, RMS, loaded, lora, patcher_of
from quant_lora_twins import CPU, FORMATS, agreement, real

comfy = real.comfy

pytestmark = pytest.mark.comfyui


@pytest.fixture(params=FORMATS)
def named(request, comfy, monkeypatch):
    """(name, patcher, its layer, x)"""
    importlib.import_module("comfy.hooks")
    monkeypatch.setenv("QPATCH_STRICT", "1")
    torch.manual_seed(0)
    patcher = patcher_of(comfy, request.param)
    return request.param, patcher, patcher.model.diffusion_model[request.param], torch.randn(2, 9, IN)


def full(comfy):
    return ("diff", (torch.randn(OUT, IN) * 0.6 * RMS,))


def dora(comfy):
    up, down, *_ = lora(comfy, 4, 0.3)[0].weights
    return comfy.weight_adapter.LoRAAdapter(set(), (up, down, None, None, 0.02 * IN**0.5 * torch.ones(OUT, 1), None))


def scheduled(comfy, patcher, name, change, strength):
    """(patcher, hooks) as a sampler has them when it begins."""
    hooks, patcher = comfy.hooks.create_hook_lora({}, 1.0, 1.0), patcher.clone()
    patcher.add_hook_patches(hooks.hooks[0], {f"diffusion_model.{name}.weight": change}, strength)
    patcher.partially_load(CPU, 1e32)
    return patcher, hooks


def in_float(comfy, layer, x, change, strength, also=0.0):
    """What ``change`` does to the output of the layer with its weight, and ``also``, in float."""
    before = layer.weight.dequantize().float() + also
    after = comfy.lora.calculate_weight([(strength, change, 1.0, None, None)], before.clone(), "a")
    return x.double() @ (after - before).double().T


@pytest.mark.parametrize("mode", ("MinVram", "MaxSpeed"))
@pytest.mark.parametrize("kind", (full, dora))
def test_a_scheduled_change_that_has_to_be_baked_comes_and_goes(comfy, named, kind, mode):
    name, patcher, layer, x = named
    base, change = layer(x), kind(comfy)
    wanted = in_float(comfy, layer, x, change, 0.7)
    patcher, hooks = scheduled(comfy, patcher, name, change, 0.7)
    patcher.set_hook_mode(comfy.hooks.EnumHookMode[mode])
    own, outputs = layer.weight, []
    for _ in range(3):
        patcher.apply_hooks(hooks)
        outputs.append(layer(x))
        patcher.apply_hooks(None)
        assert layer.weight is own and torch.equal(layer(x), base)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    # What the format itself keeps of such a change.
    cosine, _ = agreement(outputs[0] - base, wanted)
    assert cosine > 0.85


def test_one_beside_the_product_and_one_that_looks_at_the_weight_act_together(comfy, named):
    name, patcher, layer, x = named
    base = layer(x)
    fixed, dense = lora(comfy, 8, 0.5)
    change = dora(comfy)
    wanted = in_float(comfy, layer, x, change, 1.0, also=dense.float()) + x.double() @ dense.T
    patcher, hooks = scheduled(comfy, loaded(patcher, name, fixed), name, change, 1.0)
    patcher.apply_hooks(hooks)
    cosine, _ = agreement(layer(x) - base, wanted)
    assert cosine > 0.85
    patcher.apply_hooks(None)
    patcher.detach()
    assert torch.equal(layer(x), base)
