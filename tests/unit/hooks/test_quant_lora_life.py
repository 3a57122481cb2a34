"""Hook quant-lora: a layer with a pair, through loading, offloading, saving, scheduling, compiling, and back."""

import copy

import pytest
import torch

kitchen = pytest.importorskip("comfy_kitchen.tensor")

from qpatch.hooks.quant_lora import branch, fused, options, patchers, planning  # noqa: E402
from qpatch.patching import put  # noqa: E402

OUT, IN = 64, 256


@pytest.fixture
def comfy(standin, monkeypatch):
    monkeypatch.setenv(options.VARIABLE, options.SIDE)
    torch.manual_seed(0)
    module = standin("quant_lora/model_patcher.py", "comfy.model_patcher")
    put(list(patchers.patches(module)))
    return module


class Model(torch.nn.Module):
    def __init__(self, comfy, dtype=torch.float32):
        super().__init__()
        for name in ("a", "b"):
            values = (torch.randn(OUT, IN) * 0.03).to(dtype)
            quantized = kitchen.QuantizedTensor.from_float(values, "TensorCoreNVFP4Layout")
            setattr(self, name, comfy.Linear(quantized, torch.randn(OUT, dtype=dtype)))
        self.norm = torch.nn.LayerNorm(OUT, dtype=dtype)

    def forward(self, x):
        return self.norm(self.a(x)) + self.b(x)


@pytest.fixture
def world(comfy):
    """(model, patcher without LoRA, x, its output)"""
    model, x = Model(comfy), torch.randn(7, IN)
    patcher = comfy.ModelPatcher(model)
    patcher.partially_load(patcher.load_device, 99)
    return model, patcher, x, model(x)


def adapter(comfy, rank=4, rows=OUT):
    return comfy.Adapter("lora", torch.randn(rows, rank) * 0.01, torch.randn(rank, IN), None, None, None, None)


def dense(one):
    return one.weights[0].double() @ one.weights[1].double()


def on(patcher, changes, strength=1.0, fit=99):
    clone = patcher.clone()
    clone.add_patches(changes, strength)
    clone.partially_load(clone.load_device, fit)
    return clone


def forwards(model):
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_removal_strength_zero_and_reload_give_the_base_bitwise(world, comfy):
    model, patcher, x, base = world
    weight, data = model.a.weight, model.a.weight._qdata.clone()
    lora = on(patcher, {"a.weight": adapter(comfy), "b.weight": adapter(comfy)})
    with_lora = model(x)
    assert forwards(model) == ["a", "b"] and not torch.equal(with_lora, base)
    assert model.a.weight is weight and torch.equal(model.a.weight._qdata, data)
    lora.unpatch_model()
    assert forwards(model) == [] and torch.equal(model(x), base)
    lora.partially_load(lora.load_device, 99)
    assert torch.equal(model(x), with_lora)
    on(patcher, {"a.weight": adapter(comfy)}, strength=0.0)
    assert forwards(model) == [] and torch.equal(model(x), base)
    patcher.partially_load(patcher.load_device, 99)
    assert torch.equal(model(x), base)


def test_nothing_of_the_pair_is_in_the_state_dict_or_among_parameters_and_buffers(world, comfy):
    model, patcher, *_ = world
    before = set(model.state_dict()), len(list(model.parameters())), len(list(model.buffers()))
    on(patcher, {"a.weight": adapter(comfy)})
    assert (set(model.state_dict()), len(list(model.parameters())), len(list(model.buffers()))) == before


@pytest.mark.parametrize("fit", (0, 1))
def test_layers_that_do_not_fit_get_no_function_and_stay_quantized(world, comfy, fit):
    model, patcher, x, base = world
    one = adapter(comfy)
    on(patcher, {"b.weight": one}, fit=fit)
    assert model.b.weight_function == []
    torch.testing.assert_close((model(x) - base).double(), x.double() @ dense(one).T, atol=1e-4, rtol=1e-3)


def test_a_layer_that_is_moved_out_keeps_its_lora(world, comfy):
    model, patcher, x, base = world
    one = adapter(comfy)
    lora = on(patcher, {"b.weight": one})
    inside = model(x)
    lora.partially_unload(lora.offload_device, 2)
    assert model.b.weight_function == [] and torch.equal(model(x), inside)


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
        clone.partially_load(clone.load_device, 99)
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
    choice = planning.plan(clone).choices["b.weight"]
    assert not choice.side and "NaN" in choice.split.reasons[0]


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
    clone.partially_load(clone.load_device, 99)
    saved = clone.model_state_dict_for_saving()["b.weight"].dequantize().double() - base
    wanted = full.double() + dense(one)
    assert (saved - wanted).norm() / wanted.norm() < 0.2


def test_patches_that_are_forced_into_the_weights_do_not_run_beside_as_well(world, comfy):
    model, patcher, x, base = world
    one = comfy.Adapter("lora", torch.randn(OUT, 8) * 0.05, torch.randn(8, IN), *[None] * 4)
    lora = on(patcher, {"b.weight": one})
    lora.partially_load(lora.load_device, 99, force_patch_weights=True)
    baked = model(x)
    assert forwards(model) == [] and not torch.equal(baked, base)
    lora.partially_load(lora.load_device, 99)
    assert forwards(model) == ["b"]
    torch.testing.assert_close((model(x) - base).double(), x.double() @ dense(one).T, atol=1e-3, rtol=1e-3)


def test_scheduled_loras_come_and_go_beside_the_product(world, comfy):
    model, patcher, x, base = world
    fixed, one, two = adapter(comfy), adapter(comfy), adapter(comfy)
    lora = on(patcher, {"b.weight": fixed})
    lora.hook_patches = {"one": {"b.weight": [(1.0, one, 1.0, None, None)]},
                         "two": {"b.weight": [(0.5, two, 1.0, None, None)]}}
    without = model(x)
    lora.patch_hooks({"one": 1.0, "two": 2.0})
    wanted = x.double() @ (dense(fixed) + dense(one) + dense(two)).T
    torch.testing.assert_close((model(x) - base).double(), wanted, atol=1e-4, rtol=1e-3)
    lora.patch_hooks({"two": 1.0})
    wanted = x.double() @ (dense(fixed) + 0.5 * dense(two)).T
    torch.testing.assert_close((model(x) - base).double(), wanted, atol=1e-4, rtol=1e-3)
    lora.patch_hooks(None)
    assert torch.equal(model(x), without)
    lora.unpatch_model()
    assert torch.equal(model(x), base)


def test_a_copy_of_a_model_runs_its_own_pair(world, comfy):
    model, patcher, x, base = world
    branch.put(model.norm, fixed=None)
    twin = copy.deepcopy(model.norm)
    assert branch.of(twin) is twin.forward and twin.forward.module is twin
    branch.remove(model.norm, fixed=True)
    assert "forward" not in vars(model.norm) and "forward" in vars(twin)


def test_a_forward_that_somebody_wrapped_afterwards_still_works(world, comfy):
    model, patcher, x, base = world
    lora = on(patcher, {"b.weight": adapter(comfy)})
    inner = model.b.forward
    model.b.forward = lambda x: inner(x) + 1
    shifted = model(x)
    lora.unpatch_model()
    torch.testing.assert_close(model(x), base + 1)
    lora.partially_load(lora.load_device, 99)
    assert torch.equal(model(x), shifted)


def test_compiled_models_see_loras_come_change_and_go_without_graph_breaks(comfy):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    model = torch.nn.Sequential(torch.nn.Linear(IN, OUT), torch.nn.Linear(OUT, OUT))
    x = torch.randn(3, IN)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    base = compiled(x)
    pairs = [planning.Pair(torch.randn(rank, IN), torch.randn(OUT, rank)) for rank in (2, 2, 5)]
    for pair in pairs:
        branch.put(model[0], fixed=pair)
        torch.testing.assert_close(compiled(x), model[1](torch.nn.functional.linear(
            x, model[0].weight + pair.up @ pair.down, model[0].bias)), atol=1e-4, rtol=1e-4)
    branch.remove(model[0], fixed=True)
    assert torch.equal(compiled(x), base) and len(graphs) >= 2


def test_a_fused_call_past_the_forward_goes_through_it_where_a_pair_is(world, comfy):
    model, patcher, x, _ = world

    class Ops:
        INPUT_ACT_EAGER = {"gelu": torch.nn.functional.gelu}

    calls = []
    call = fused._by_forward(Ops)(lambda linear, x, act: calls.append(act))
    call(model.b, x, "gelu")
    assert calls == ["gelu"]
    on(patcher, {"b.weight": adapter(comfy)})
    assert torch.equal(call(model.b, x, "gelu"), model.b(torch.nn.functional.gelu(x))) and calls == ["gelu"]


def test_auto_bakes_what_survives_and_keeps_the_rest_beside(world, comfy, monkeypatch, caplog):
    model, patcher, *_ = world
    monkeypatch.setenv(options.VARIABLE, "auto")
    small = comfy.Adapter("lora", torch.randn(OUT, 4) * 0.001, torch.randn(4, IN), *[None] * 4)
    large = comfy.Adapter("lora", torch.randn(OUT, 8) * 0.05, torch.randn(8, IN), *[None] * 4)
    with caplog.at_level("INFO", "qpatch"):
        on(patcher, {"a.weight": small, "b.weight": large})
    assert forwards(model) == ["a"] and not torch.equal(model.b.weight._qdata, patcher.backup["b.weight"].weight._qdata)
    assert "1 layers beside the quantized product" in caplog.text and "1 baked by ComfyUI" in caplog.text


def test_another_strength_another_lora_and_none_leave_the_weights_loaded(world, comfy, monkeypatch):
    model, patcher, x, base = world
    first, second = adapter(comfy), adapter(comfy)
    reloads, load = [], comfy.ModelPatcher.unpatch_hooks
    # Each reload of the stand-in begins with it.
    counting = lambda self, *args: (reloads.append(self), load(self, *args))  # noqa: E731
    monkeypatch.setattr(comfy.ModelPatcher, "unpatch_hooks", counting)
    for changes, strength in (((first,), 1.0), ((first,), 0.25), ((first, second), 1.0), ((), 1.0), ((second,), -1.0)):
        clone = patcher.clone()
        for one in changes:
            clone.add_patches({"b.weight": one}, strength)
        clone.partially_load(clone.load_device, 99)
        wanted = strength * x.double() @ sum((dense(one) for one in changes), torch.zeros(OUT, IN).double()).T
        torch.testing.assert_close((model(x) - base).double(), wanted, atol=1e-3, rtol=1e-3)
    assert reloads == []


def test_what_has_to_be_baked_reloads_the_weights_and_unbakes_them(world, comfy):
    model, patcher, x, base = world
    full = torch.randn(OUT, IN) * 0.1
    both = patcher.clone()
    both.add_patches({"b.weight": ("diff", (full,))})
    both.add_patches({"b.weight": adapter(comfy)})
    both.partially_load(both.load_device, 99)
    only = both.clone()
    only.patches = {"b.weight": both.patches["b.weight"][1:]}
    only.patches_uuid = object()
    only.partially_load(only.load_device, 99)
    wanted = x.double() @ dense(only.patches["b.weight"][0][1]).T
    torch.testing.assert_close((model(x) - base).double(), wanted, atol=1e-4, rtol=1e-3)
    patcher.partially_load(patcher.load_device, 99)
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
        clone.partially_load(clone.load_device, 99)
        wanted = x.double() @ (full.double() + dense(one)).T
        assert ((model(x) - base).double() - wanted).norm() / wanted.norm() < 0.2
