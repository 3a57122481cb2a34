"""Hook quant-lora: a layer with a pair, through loading, offloading, scheduling, compiling, and back."""

import copy

import pytest
import torch

pytest.importorskip("comfy_kitchen.tensor")

from quant_lora_model import IN, OUT, adapter, dense, forwards, on

from qpatch.hooks.quant_lora import branch, fused, memory, options, planning


def test_removal_strength_zero_and_reload_give_the_base_bitwise(world, comfy):
    model, patcher, x, base = world
    weight, data = model.a.weight, model.a.weight._qdata.clone()
    lora = on(patcher, {"a.weight": adapter(comfy), "b.weight": adapter(comfy)})
    with_lora = model(x)
    assert forwards(model) == ["a", "b"] and not torch.equal(with_lora, base)
    assert model.a.weight is weight and torch.equal(model.a.weight._qdata, data)
    lora.unpatch_model()
    assert forwards(model) == [] and torch.equal(model(x), base)
    lora.partially_load(lora.load_device, 1e32)
    assert torch.equal(model(x), with_lora)
    on(patcher, {"a.weight": adapter(comfy)}, strength=0.0)
    # Neither beside nor rounded again.
    assert forwards(model) == [] and torch.equal(model(x), base) and model.a.weight is weight
    patcher.partially_load(patcher.load_device, 1e32)
    assert torch.equal(model(x), base)


def test_patches_of_strength_zero_change_nothing_whatever_they_are(world, comfy):
    model, patcher, x, base = world
    weight, dora = model.b.weight, adapter(comfy)
    dora.weights = (*dora.weights[:4], torch.ones(OUT, 1), None)
    for change in (("diff", (torch.randn(OUT, IN),)), dora, [(weight, None)]):
        clone = on(patcher, {"b.weight": change}, strength=0.0)
        assert model.b.weight is weight and torch.equal(model(x), base)
        assert clone.patch_weight_to_device("b.weight", return_weight=True) is weight


def test_the_memory_of_the_factors_is_taken_from_what_may_be_loaded(world, comfy, monkeypatch):
    model, patcher, *_ = world
    clone = patcher.clone()
    clone.add_patches({"a.weight": adapter(comfy, rank=16), "b.weight": adapter(comfy, rank=3)})
    clone.add_patches({"a.weight": adapter(comfy)}, 0.0)
    size = (16 + 3) * (OUT + IN) * 4
    assert memory.planned(clone) == size and memory.left(clone, 1e6) == 1e6 - size and 0 < memory.left(clone, 5) < 1
    clone.partially_load(clone.load_device, 1e32)
    # Now they are there.
    assert memory.attached(model) == size and memory.left(clone, 1e6) == 1e6
    assert memory.left(patcher, 1e6) == 1e6 and memory.left(clone, -3) == -3
    monkeypatch.setenv(options.VARIABLE, options.BAKE)
    assert memory.planned(clone) == 0


def test_nothing_of_the_pair_is_in_the_state_dict_or_among_parameters_and_buffers(world, comfy):
    model, patcher, *_ = world
    before = set(model.state_dict()), len(list(model.parameters())), len(list(model.buffers()))
    on(patcher, {"a.weight": adapter(comfy)})
    assert (set(model.state_dict()), len(list(model.parameters())), len(list(model.buffers()))) == before


@pytest.mark.parametrize("fit", (0, 1))
def test_layers_that_do_not_fit_get_no_function_and_stay_quantized(world, comfy, fit):
    model, patcher, x, base = world
    one = adapter(comfy)
    on(patcher, {"b.weight": one}, fit=fit * comfy.LAYER)
    assert model.b.weight_function == []
    torch.testing.assert_close((model(x) - base).double(), x.double() @ dense(one).T, atol=1e-4, rtol=1e-3)


def test_a_layer_that_is_moved_out_keeps_its_lora(world, comfy):
    model, patcher, x, base = world
    one = adapter(comfy)
    lora = on(patcher, {"b.weight": one})
    inside = model(x)
    lora.partially_unload(lora.offload_device, 2)
    assert model.b.weight_function == [] and torch.equal(model(x), inside)


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
    lora.partially_load(lora.load_device, 1e32)
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


def test_another_strength_another_lora_and_none_leave_the_weights_loaded(world, comfy, monkeypatch):
    model, patcher, x, base = world
    first, second = adapter(comfy), adapter(comfy)
    reloads, load = [], comfy.ModelPatcher.unpatch_hooks
    # Each reload of the stand-in begins with it.
    counting = lambda self, *args: (reloads.append(self), load(self, *args))
    monkeypatch.setattr(comfy.ModelPatcher, "unpatch_hooks", counting)
    for changes, strength in (((first,), 1.0), ((first,), 0.25), ((first, second), 1.0), ((), 1.0), ((second,), -1.0)):
        clone = patcher.clone()
        for one in changes:
            clone.add_patches({"b.weight": one}, strength)
        clone.partially_load(clone.load_device, 1e32)
        wanted = strength * x.double() @ sum((dense(one) for one in changes), torch.zeros(OUT, IN).double()).T
        torch.testing.assert_close((model(x) - base).double(), wanted, atol=1e-3, rtol=1e-3)
    assert reloads == []
