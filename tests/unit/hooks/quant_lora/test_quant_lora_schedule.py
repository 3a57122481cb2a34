"""Hook quant-lora: what conditioning hooks switch on and off in each step of a sampler."""

import sys
from types import SimpleNamespace

import pytest
import torch
from quant_lora_model import adapter, dense, on

from qpatch.hooks.quant_lora import options, standin, switching


@pytest.fixture
def scheduled(world, comfy, monkeypatch):
    """(patcher with the hooks "one", a LoRA on b, and "full", a difference on a; the model, x, its output)"""
    model, patcher, x, base = world
    patcher = patcher.clone()
    full = "diff", (torch.randn(model.a.weight.shape) * 0.1,)
    patcher.hook_patches = {"one": {"b.weight": [(1.0, adapter(comfy), 1.0, None, None)]},
                            "full": {"a.weight": [(1.0, full, 1.0, None, None)]}}
    patcher.hook_memory = SimpleNamespace(use=lambda weight: True)
    modules = {"comfy.lora": {"calculate_weight": comfy.calculate_weight},
               "comfy.utils": {"string_to_seed": lambda key: 1}}
    for name, contents in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**contents))
    return patcher, model, x, base


def effect(model, x, base):
    return (model(x) - base).double()


def test_switching_back_to_a_lora_composes_nothing_and_another_strength_only_scales(scheduled, monkeypatch):
    patcher, model, x, base = scheduled
    change = dense(patcher.hook_patches["one"]["b.weight"][0][1])
    patcher.patch_hooks({"one": 1.0})
    monkeypatch.setattr(switching, "compose", None)
    for strength in (None, 1.0, 0.5, None, 1.0):
        patcher.patch_hooks(strength and {"one": strength})
        wanted = (strength or 0.0) * x.double() @ change.T
        torch.testing.assert_close(effect(model, x, base), wanted, atol=1e-4, rtol=1e-3)


def test_a_switch_predicts_nothing(scheduled, monkeypatch):
    patcher, model, x, base = scheduled
    monkeypatch.setenv(options.VARIABLE, options.AUTO)
    for name in ("kept.of_terms", "kept.predict", "splitting.lowrank", "splitting._norm"):
        monkeypatch.setattr(f"qpatch.hooks.quant_lora.{name}", None)
    patcher.patch_hooks({"one": 1.0, "full": 1.0})
    assert not torch.equal(model(x), base)


def test_a_change_that_has_to_be_baked_is_in_a_weight_that_stands_in_and_the_own_weight_comes_back(scheduled, comfy):
    patcher, model, x, base = scheduled
    own, change = model.a.weight, patcher.hook_patches["full"]["a.weight"][0][1][1][0]
    patcher.patch_hooks({"full": 1.0})
    first = model(x)
    error = model.a.weight.dequantize() - own.dequantize() - change
    assert error.norm() < 0.2 * change.norm() and model.a.weight is not own
    patcher.patch_hooks(None)
    assert model.a.weight is own and torch.equal(model(x), base)
    # The second time ComfyUI has it in its cache.
    patcher.hook_patches["full"]["a.weight"] = [(1.0, ("diff", (torch.zeros_like(change),)), 1.0, None, None)]
    patcher.patch_hooks({"full": 1.0})
    assert torch.equal(model(x), first)
    patcher.unpatch_model()
    assert model.a.weight is own and torch.equal(model(x), base)


def test_groups_that_take_turns_leave_nothing_of_each_other(scheduled):
    patcher, model, x, base = scheduled
    own, outputs = model.a.weight, {}
    for name in ("full", "one", "full", "one", None, "full"):
        patcher.patch_hooks(name and {name: 1.0})
        assert standin.stands(model.a) == (name == "full") and (model.a.weight is own) == (name != "full")
        assert torch.equal(outputs.setdefault(name, model(x)), model(x))
    assert not torch.equal(outputs["one"], outputs["full"]) and torch.equal(outputs[None], base)


def test_a_stand_in_that_was_moved_gives_way_to_the_own_weight_on_its_new_device(scheduled):
    patcher, model, _, _ = scheduled
    own = model.a.weight
    patcher.patch_hooks({"full": 1.0})
    model.a.weight = torch.nn.Parameter(torch.empty(own.shape, device="meta"), requires_grad=False)
    patcher.patch_hooks(None)
    assert model.a.weight.device.type == "meta" and type(model.a.weight.data) is not torch.Tensor


def test_a_change_that_cannot_be_baked_is_left_out_and_the_log_says_so(scheduled, monkeypatch, caplog):
    patcher, model, x, base = scheduled
    monkeypatch.delenv("QPATCH_STRICT", raising=False)

    def refuse(*_, **__):
        raise NotImplementedError("this layout is made offline")

    monkeypatch.setattr(model.a, "set_weight", refuse, raising=False)
    with caplog.at_level("WARNING", logger="qpatch"):
        patcher.patch_hooks({"full": 1.0, "one": 1.0})
    assert "no effect on a.weight" in caplog.text and "made offline" in caplog.text
    assert not torch.equal(model(x), base)
    patcher.patch_hooks(None)
    assert torch.equal(model(x), base)


def test_a_change_that_looks_at_the_weight_sees_the_lora_that_runs_beside_it(scheduled, comfy):
    patcher, model, _, _ = scheduled
    one = adapter(comfy)
    fixed = on(patcher, {"a.weight": one})
    factor = [(1.0, ("diff", (torch.zeros(model.a.weight.shape),)), 0.5, None, None)]
    fixed.hook_patches = {"half": {"a.weight": factor}}
    weight = model.a.weight.dequantize().double()
    fixed.patch_hooks({"half": 1.0})
    acts = model.a.weight.dequantize().double() + dense(one)
    wanted = 0.5 * (weight + dense(one))
    assert (acts - wanted).norm() < 0.2 * wanted.norm()
