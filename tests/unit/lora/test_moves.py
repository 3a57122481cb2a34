"""A composed model that is moved to another device or converted to another dtype."""

import pytest
import torch
import trees
from test_composition import NAMES, bits, file, same, traces

from qpatch import lora


@pytest.fixture
def model():
    torch.manual_seed(0)
    return trees.qwen()


def test_after_a_conversion_reset_gives_what_the_bare_model_would_be(model):
    torch.manual_seed(0)
    bare = trees.qwen().half()
    originals = dict(model.named_parameters())
    lora.compose(model, [(file(), 1.0)])
    model.half()
    lora.reset(model)
    assert same(bits(model), bits(bare))
    assert all(originals[name] is parameter for name, parameter in model.named_parameters())


def test_composing_after_a_conversion_starts_from_the_converted_base(model):
    torch.manual_seed(0)
    bare = trees.qwen().half()
    lora.compose(bare, [(file(), 1.0)])
    lora.compose(model, [(file(1), 1.0)])
    model.half()
    lora.compose(model, [(file(), 1.0)])
    assert same(bits(model), bits(bare))


def test_a_plan_is_for_the_model_as_it_is_when_it_is_applied(model):
    torch.manual_seed(0)
    bare = trees.qwen().half()
    lora.compose(bare, [(file(), 1.0)])
    planned = lora.plan(model, [(file(), 1.0)])
    model.half()
    planned.apply()
    assert same(bits(model), bits(bare))


def test_strengths_can_be_changed_after_a_conversion(model):
    lora.compose(model, [(file(), 1.0)])
    model.half()
    converted = bits(model)
    lora.set_strengths(model, [0.25])
    layer = model.get_submodule(NAMES[0])
    assert layer.proj_up.dtype == torch.float16
    quarter = trees.effective(layer)
    lora.set_strengths(model, [1.0])
    # Plain weights were rounded twice when the model was converted, and only once now.
    low_rank = {name: value for name, value in converted.items() if ".proj_" in name or "lora" in name}
    assert same({name: bits(model)[name] for name in low_rank}, low_rank)
    base = trees.unpacked(layer.proj_up, False)[:, :16] @ trees.unpacked(layer.proj_down, True)[:16]
    assert torch.allclose(quarter - base, (trees.effective(layer) - base) / 4, atol=2e-3)


def test_what_is_not_in_the_model_goes_where_the_model_goes(model):
    opened = lora.open_lora(file())
    lora.compose(model, [(opened, 1.0)])
    changes = [change for module in model.modules() for change in module.__dict__.get("_qpatch_lora_changes", ())]
    tensors = [value for change in changes for value in change.originals.values() if isinstance(value, torch.Tensor)]
    assert len(tensors) > 10
    model.to("meta")
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_what_was_set_aside_goes_where_the_model_goes(model):
    opened = lora.open_lora(file())
    lora.compose(model, [(opened, 1.0)])
    composed = [model.get_submodule(name).proj_up for name in NAMES]
    lora.set_aside(model)
    model.to("meta")
    assert {tensor.device.type for tensor in composed} == {"meta"}
    assert model.get_submodule(NAMES[0]).proj_up.device.type == "meta"


def test_originals_keep_their_bits_through_conversions_there_and_back(model):
    before = bits(model)
    lora.compose(model, [(file(), 1.0)])
    model.half().bfloat16()
    lora.reset(model)
    after = bits(model)
    names = [name for name in before if ".proj_" in name or name.startswith("img_in")]
    assert names and all(torch.equal(after[name], before[name]) for name in names)
    assert traces(model) == []


def test_modules_moved_one_by_one_get_their_originals_where_they_are(model):
    """ComfyUI moves single modules, which says nothing to the model."""
    layer = model.get_submodule(NAMES[0])
    original = layer.proj_down
    lora.compose(model, [(file(), 1.0)])
    layer.to("meta")
    assert original.device.type == "cpu"
    lora.reset(model)
    assert layer.proj_down is original and original.device.type == "meta"
    assert model.get_submodule(NAMES[1]).proj_down.device.type == "cpu"
