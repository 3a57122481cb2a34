"""Hook quant-lora: what ComfyUI still bakes, and what it writes into a file."""

import pytest
import torch

pytest.importorskip("comfy_kitchen.tensor")

from quant_lora_model import IN, OUT, adapter, dense, forwards, on

from qpatch.hooks.quant_lora import options, planning


def test_bias_and_norm_take_comfyui_s_way(world, comfy):
    model, patcher, x, _ = world
    bias, norm = torch.randn(OUT), torch.randn(OUT)
    before = model.a.bias.clone(), model.norm.weight.clone()
    lora = on(patcher, {"a.bias": ("diff", (bias,)), "norm.weight": ("diff", (norm,)), "a.weight": adapter(comfy)}, 0.5)
    torch.testing.assert_close(model.a.bias, before[0] + 0.5 * bias)
    # The stand-in takes no layer without casts; ComfyUI takes this one, and neither is the hook's business.
    assert set(planning.of(model).choices) == {"a.weight"} and "norm.weight" in lora.patches
    lora.unpatch_model()
    assert torch.equal(model.a.bias, before[0])


def test_what_has_no_small_rank_is_baked_and_said(world, comfy, caplog):
    model, patcher, x, base = world
    one, full = adapter(comfy), torch.randn(OUT, IN) * 0.03
    with caplog.at_level("INFO", "qpatch"):
        clone = patcher.clone()
        clone.add_patches({"b.weight": ("diff", (full,))})
        clone.add_patches({"b.weight": one}, 0.5)
        clone.partially_load(clone.load_device, 1e32)
    assert "baked in 1 layers" in caplog.text and "full difference" in caplog.text and "% of it" in caplog.text
    baked = model.b.weight.dequantize().double() - clone.backup["b.weight"].weight.dequantize().double()
    assert (baked - full.double()).norm() / full.double().norm() < 0.2
    wanted = x.double() @ (baked + 0.5 * dense(one)).T
    torch.testing.assert_close((model(x) - base).double(), wanted, atol=1e-3, rtol=1e-2)


def test_what_depends_on_the_weight_is_baked_with_all_before_it(world, comfy):
    model, patcher, *_ = world
    first, dora, last = adapter(comfy), adapter(comfy), adapter(comfy)
    dora.weights = (*dora.weights[:4], torch.ones(OUT, 1), None)
    clone = patcher.clone()
    for one in (first, dora, last):
        clone.add_patches({"b.weight": one})
    split = planning.plan(clone).choices["b.weight"].split
    assert [patch[1] for patch in split.rest] == [first, dora] and [patch[1] for patch in split.patches] == [last]


def test_a_non_finite_lora_is_left_to_comfyui(world, comfy):
    model, patcher, *_ = world
    one = adapter(comfy)
    one.weights[0][3, 1] = float("nan")
    clone = patcher.clone()
    clone.add_patches({"b.weight": one})
    plan = planning.plan(clone)
    assert plan.beside == [] and plan.baked == clone.patches and "NaN" in plan.choices["b.weight"].split.reasons[0]


def test_a_saved_model_contains_the_lora(world, comfy, caplog):
    model, patcher, *_ = world
    one = comfy.Adapter("lora", torch.randn(OUT, 8) * 0.05, torch.randn(8, IN), None, None, None, None)
    base = model.b.weight.dequantize()
    lora = on(patcher, {"b.weight": one})
    saved = lora.model_state_dict_for_saving()["b.weight"].dequantize().double() - base.double()
    assert (saved - dense(one)).norm() / dense(one).norm() < 0.15
    assert "for saving" in caplog.text and forwards(model) == ["b"] and model.b.comfy_patched_weights
    assert torch.equal(model.b.weight.dequantize(), base)


def test_a_saved_layer_has_each_of_its_patches_once(world, comfy):
    model, patcher, *_ = world
    one = comfy.Adapter("lora", torch.randn(OUT, 8) * 0.05, torch.randn(8, IN), *[None] * 4)
    full = torch.randn(OUT, IN) * 0.1
    base = model.b.weight.dequantize().double()
    clone = patcher.clone()
    clone.add_patches({"b.weight": ("diff", (full,))})
    clone.add_patches({"b.weight": one})
    clone.partially_load(clone.load_device, 1e32)
    saved = clone.model_state_dict_for_saving()["b.weight"].dequantize().double() - base
    wanted = full.double() + dense(one)
    assert (saved - wanted).norm() / wanted.norm() < 0.2


def test_patches_that_are_forced_into_the_weights_do_not_run_beside_as_well(world, comfy):
    model, patcher, x, base = world
    one = comfy.Adapter("lora", torch.randn(OUT, 8) * 0.05, torch.randn(8, IN), *[None] * 4)
    lora = on(patcher, {"b.weight": one})
    lora.partially_load(lora.load_device, 1e32, force_patch_weights=True)
    baked = model(x)
    assert forwards(model) == [] and not torch.equal(baked, base)
    lora.partially_load(lora.load_device, 1e32)
    assert forwards(model) == ["b"]
    torch.testing.assert_close((model(x) - base).double(), x.double() @ dense(one).T, atol=1e-3, rtol=1e-3)


def test_auto_bakes_what_survives_and_keeps_the_rest_beside(world, comfy, monkeypatch, caplog):
    model, patcher, *_ = world
    monkeypatch.setenv(options.VARIABLE, "auto")
    small = comfy.Adapter("lora", torch.randn(OUT, 4) * 0.001, torch.randn(4, IN), *[None] * 4)
    large = comfy.Adapter("lora", torch.randn(OUT, 8) * 0.05, torch.randn(8, IN), *[None] * 4)
    with caplog.at_level("INFO", "qpatch"):
        on(patcher, {"a.weight": small, "b.weight": large})
    assert forwards(model) == ["a"] and not torch.equal(model.b.weight._qdata, patcher.backup["b.weight"].weight._qdata)
    assert "1 layers beside the quantized product" in caplog.text and "1 baked by ComfyUI" in caplog.text


def test_what_has_to_be_baked_reloads_the_weights_and_unbakes_them(world, comfy):
    model, patcher, x, base = world
    full = torch.randn(OUT, IN) * 0.1
    both = patcher.clone()
    both.add_patches({"b.weight": ("diff", (full,))})
    both.add_patches({"b.weight": adapter(comfy)})
    both.partially_load(both.load_device, 1e32)
    only = both.clone()
    only.patches = {"b.weight": both.patches["b.weight"][1:]}
    only.patches_uuid = object()
    only.partially_load(only.load_device, 1e32)
    wanted = x.double() @ dense(only.patches["b.weight"][0][1]).T
    torch.testing.assert_close((model(x) - base).double(), wanted, atol=1e-4, rtol=1e-3)
    patcher.partially_load(patcher.load_device, 1e32)
    assert torch.equal(model(x), base)


def test_integers_can_stand_in_for_a_weight_that_is_saved_later(comfy):
    piece = comfy.LazyCastingParamPiece(None, "a.weight", torch.zeros(3, dtype=torch.uint8))
    assert type(piece) is comfy.LazyCastingParamPiece and not piece.requires_grad
    assert comfy.LazyCastingParamPiece(None, "a.bias", torch.zeros(3)).requires_grad


def test_another_change_to_bake_in_the_place_of_the_first_is_baked(world, comfy):
    model, patcher, x, base = world
    one = adapter(comfy)
    for full in (torch.randn(OUT, IN) * 0.1, torch.randn(OUT, IN) * 0.1):
        clone = patcher.clone()
        clone.add_patches({"b.weight": ("diff", (full,))})
        clone.add_patches({"b.weight": one})
        clone.partially_load(clone.load_device, 1e32)
        wanted = x.double() @ (full.double() + dense(one)).T
        assert ((model(x) - base).double() - wanted).norm() / wanted.norm() < 0.2
