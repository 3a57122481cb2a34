"""The branch beside nunchaku's modulation layers: its effect on the output, copies, compilation, conversions."""

import copy

import producers
import pytest
import stored_weights
import torch
import trees

from qpatch import lora

NAME = "transformer_blocks.0.img_mod.1"


def file(seed=0, rank=4, kind="lora", dims=trees.QWEN_DIMS):
    example = producers.make("simpletuner lycoris", "qwen-image", kind, rank=rank, dims=dims, seed=seed)
    return example, {key: value for key, value in example.tensors.items() if "_mod_1" in key}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return trees.qwen(dtype=torch.float16)


def modulation(model, x):
    """The output in planar order, as the block makes it of the layer's."""
    output = model.get_submodule(NAME)(x)
    return output.double().view(len(x), -1, 6).transpose(1, 2).reshape(len(x), -1)


def test_the_output_changes_by_the_loras_product_in_the_order_of_the_original(model):
    x = torch.randn(5, 64).half()
    before = modulation(model, x)
    example, tensors = file()
    lora.compose(model, [(tensors, 0.5)])
    wanted = x.double() @ torch.from_numpy(example.layers[NAME].change(None, 0.5)).T
    error = (modulation(model, x) - before - wanted).norm() / wanted.norm()
    assert error < 3e-3
    lora.set_strengths(model, [0.0])
    assert torch.equal(modulation(model, x), before)
    lora.reset(model)
    assert torch.equal(modulation(model, x), before)


def test_a_bare_layer_has_neither_hook_nor_buffers(model):
    layer = model.get_submodule(NAME)
    names = list(layer._buffers)
    lora.compose(model, [(file()[1], 0.5)])
    assert len(layer._forward_hooks) == 1 and set(layer._buffers) - set(names) == {"qpatch_lora_down", "qpatch_lora_up"}
    lora.compose(model, [(file(1)[1], 0.5)])
    assert len(layer._forward_hooks) == 1
    lora.reset(model)
    assert not layer._forward_hooks and not layer._forward_hooks_with_kwargs and list(layer._buffers) == names


def test_other_hooks_stay_and_run(model):
    seen = []
    layer = model.get_submodule(NAME)
    layer.register_forward_hook(lambda module, args, output: seen.append(1))
    lora.compose(model, [(file()[1], 0.5)])
    modulation(model, torch.randn(1, 64).half())
    lora.reset(model)
    modulation(model, torch.randn(1, 64).half())
    assert seen == [1, 1] and len(layer._forward_hooks) == 1


def test_a_copy_computes_the_same_and_is_reset_by_itself(model):
    x = torch.randn(2, 64).half()
    bare = modulation(model, x)
    lora.compose(model, [(file()[1], 0.5)])
    composed, twin = modulation(model, x), copy.deepcopy(model)
    lora.reset(model)
    assert torch.equal(modulation(twin, x), composed)
    lora.reset(twin)
    assert torch.equal(modulation(twin, x), bare) and torch.equal(modulation(model, x), bare)


def test_it_compiles_without_a_graph_break(model):
    x = torch.randn(2, 64).half()
    lora.compose(model, [(file()[1], 0.5)])
    layer = model.get_submodule(NAME)
    expected = layer(x)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)


def test_it_converts_with_the_model(model):
    lora.compose(model, [(file()[1], 0.5)])
    before = modulation(model, torch.ones(1, 64).half())
    model.bfloat16()
    after = modulation(model, torch.ones(1, 64).bfloat16())
    assert (after - before).norm() < 0.02 * before.norm()


def test_the_bias_is_interleaved_like_the_rows(model):
    example, tensors = file(kind="diff_b")
    layer = model.get_submodule(NAME)
    before = stored_weights.planar(layer.bias.detach().double()[:, None])[:, 0]
    lora.compose(model, [(tensors, 0.5)])
    after = stored_weights.planar(layer.bias.detach().double()[:, None])[:, 0]
    wanted = torch.from_numpy(example.layers[NAME].bias(None, 0.5))
    assert (after - before - wanted).abs().max() < 4e-3


def test_a_change_without_a_small_rank_is_truncated_and_its_error_reported(model):
    example, tensors = file(kind="diff")
    report = lora.compose(model, [(tensors, 1.0)], max_rank=8)
    (line,) = [line for line in report.files[0].lines if line.module == NAME]
    layer = model.get_submodule(NAME)
    found = stored_weights.planar(layer.qpatch_lora_up.double() @ layer.qpatch_lora_down.double())
    wanted = torch.from_numpy(example.layers[NAME].change(None, 1.0))
    values = torch.linalg.svdvals(wanted)
    best = (values[8:].square().sum() / values.square().sum()).sqrt().item()
    assert line.rank == 8 and abs(line.error - best) < 1e-6 * best
    assert abs((found - wanted).norm().item() / wanted.norm().item() - line.error) < 1e-3
    assert "truncation error" in str(report)
