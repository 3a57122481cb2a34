"""Modules that somebody exchanges, and calls that come again: what is in the model is what the report says."""

import copy

import producers
import pytest
import trees
from test_composition import bits, file, same, traces

from qpatch import lora


@pytest.fixture
def model():
    return trees.qwen()


@pytest.mark.parametrize("call", [lora.reset, lambda model: lora.compose(model, []),
                                  lambda model: (lora.compose(model, [(file(seed=3), 0.5)]), lora.reset(model))])
def test_a_copy_of_a_block_with_a_lora_in_it_is_bare_after_a_reset(model, call):
    bare = bits(model)
    lora.compose(model, [(file(), 1.0)])
    model.transformer_blocks[0] = copy.deepcopy(model.transformer_blocks[0])
    call(model)
    assert same(bits(model), bare) and lora.composed(model) == () and not traces(model)


def test_strengths_of_an_exchanged_module_are_refused_and_composing_again_is_right(model):
    opened = lora.open_lora(file())
    lora.compose(model, [(opened, 2.0)])
    wanted = bits(model)
    lora.compose(model, [(opened, 1.0)])
    model.transformer_blocks[0] = copy.deepcopy(model.transformer_blocks[0])
    with pytest.raises(lora.PlanError, match="exchanged"):
        lora.set_strengths(model, [2.0])
    lora.compose(model, [(opened, 2.0)])
    assert same(bits(model), wanted)


def test_strict_is_heeded_when_nothing_has_to_be_worked_out(model):
    good, bad = lora.open_lora(file()), lora.open_lora(producers.make("musubi", "z-image", rank=2).tensors)
    lora.compose(model, [(good, 1.0), (bad, 1.0)])
    before = bits(model)
    with pytest.raises(lora.LoraError):
        lora.compose(model, [(good, 1.0), (bad, 1.0)], strict=True)
    assert same(bits(model), before)


def test_a_misspelt_option_is_refused_at_every_call(model):
    opened = lora.open_lora(file())
    for _ in range(2):
        with pytest.raises(TypeError, match="nosuch"):
            lora.compose(model, [(opened, 1.0)], nosuch=3)
        lora.compose(model, [(opened, 1.0)])


def test_a_plan_that_is_applied_again_reports_its_own_strengths(model):
    plan = lora.plan(model, [(file(), 1.0)])
    plan.apply()
    lora.set_strengths(model, [0.25])
    report = plan.apply()
    assert report.files[0].strength == 1.0 and report.computed and lora.composed(model)[0].strength == 1.0
