"""The life of a composition: compose, replace, change strengths, take out, copies and clones of the model."""

import copy
import io
from unittest.mock import Mock

import producers
import pytest
import torch
import trees

from qpatch import lora

NAMES = [f"transformer_blocks.0.{name}" for name in ("attn.to_qkv", "attn.to_out.0", "img_mlp.net.2")]


def file(seed=0, rank=4, kind="lora", producer="simpletuner lycoris", **options):
    return producers.make(producer, "qwen-image", kind, rank=rank, dims=trees.QWEN_DIMS, seed=seed, **options).tensors


@pytest.fixture
def model():
    torch.manual_seed(0)
    return trees.qwen()


def bits(model):
    """Everything the model computes with, by name."""
    return {name: value.detach().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def objects(model):
    return {name: id(parameter) for name, parameter in model.named_parameters()}


def traces(model):
    """What of ours is left on a model."""
    return [name for module in model.modules() for name in (*module.__dict__, *module._modules, *module._buffers)
            if "qpatch" in name] + [hook for module in model.modules() for hook in module._forward_hooks.values()]


def test_reset_puts_the_original_objects_back_and_leaves_no_trace(model):
    before, ids = bits(model), objects(model)
    lora.compose(model, [(file(), 0.7), (file(1), -1.2)])
    assert not same(bits(model), before)
    lora.reset(model)
    assert same(bits(model), before) and objects(model) == ids
    assert traces(model) == []
    lora.reset(model)
    assert traces(model) == []


def test_composing_replaces_what_was_composed_before(model):
    first, second = file(0), file(1, rank=16)
    lora.compose(model, [(first, 0.7)])
    once = bits(model)
    for loras in ([(second, 1.0)], [(first, 0.1), (second, 0.2)], [(first, 0.7)], [(first, 0.7)]):
        lora.compose(model, loras)
    assert same(bits(model), once)
    assert [entry.strength for entry in lora.composed(model)] == [0.7]


def test_composing_nothing_is_a_reset(model):
    before = bits(model)
    lora.compose(model, [(file(), 1.0)])
    report = lora.compose(model, [])
    assert same(bits(model), before) and traces(model) == [] and str(report) == "no LoRA"


def test_the_rank_attribute_says_the_rank_of_the_factors(model):
    lora.compose(model, [(file(rank=20), 1.0)])
    for name in NAMES:
        layer = model.get_submodule(name)
        assert layer.rank == layer.proj_down.shape[1] == layer.proj_up.shape[1]
        # q, k and v have a down factor each; side by side they are padded once.
        assert layer.rank == 16 + (64 if "qkv" in name else 32)
    lora.reset(model)
    assert {model.get_submodule(name).rank for name in NAMES} == {16}


def test_a_plan_touches_nothing_and_can_be_printed(model):
    before, ids = bits(model), objects(model)
    plan = lora.plan(model, [(file(), 0.5)])
    assert "modules change" in str(plan) and "layers applied" in str(plan)
    assert plan.report.files[0].applied == plan.report.files[0].total == 20
    assert same(bits(model), before) and objects(model) == ids and traces(model) == []
    assert lora.composed(model) == ()
    plan.apply()
    assert [entry.strength for entry in lora.composed(model)] == [0.5]


def test_a_strength_of_zero_gives_the_base_and_the_old_strength_the_old_bits(model):
    # A sum with zero would lose the sign of this one.
    model.img_in.weight.data[0, 0] = -0.0
    base = {name: trees.effective(model.get_submodule(name)) for name in NAMES}
    lora.compose(model, [(file(), 0.7), (file(1, rank=16), -0.3)])
    composed = bits(model)
    lora.set_strengths(model, [0, 0])
    for name in NAMES:
        assert torch.equal(trees.effective(model.get_submodule(name)), base[name])
    assert torch.equal(model.img_in.weight.view(torch.int16), lora_free(model.img_in).view(torch.int16))
    lora.set_strengths(model, [0.7, -0.3])
    assert same(bits(model), composed)


def lora_free(module):
    (change,) = module._qpatch_lora_changes
    return change.originals["weight"]


def test_new_strengths_give_what_composing_with_them_gives(model):
    stack = [file(), file(1, rank=16), file(2, rank=3)]
    lora.compose(model, [(one, 1.0) for one in stack])
    lora.set_strengths(model, [0.25, -2.0, 0.3])
    rescaled = bits(model)
    lora.compose(model, [(stack[0], 0.25), (stack[1], -2.0), (stack[2], 0.3)])
    assert same(bits(model), rescaled)
    assert [entry.strength for entry in lora.composed(model)] == [0.25, -2.0, 0.3]


def test_new_strengths_are_written_in_place(model):
    lora.compose(model, [(file(), 1.0)])
    up, down = (getattr(model.get_submodule(NAMES[0]), name) for name in ("proj_up", "proj_down"))
    address, before = up.data_ptr(), down.detach().clone()
    lora.set_strengths(model, [0.5])
    layer = model.get_submodule(NAMES[0])
    assert layer.proj_up is up and up.data_ptr() == address
    assert layer.proj_down is down and torch.equal(down, before)


def test_what_is_composed_does_not_depend_on_the_file_any_more(model, tmp_path):
    tensors = file()
    path = producers.Example("", "", "", tensors).write(tmp_path / "gone.safetensors")
    lora.compose(model, [(path, 1.0), (tensors, 1.0)])
    path.unlink()
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    lora.set_strengths(model, [0.5, 0.25])
    assert all(torch.isfinite(value.float()).all() for value in bits(model).values())


@pytest.mark.parametrize("strengths, problem", [
    ([1.0], "one strength is needed for each LoRA"), ([1.0, float("nan")], "not a finite number"),
    ([1.0, "much"], "not a finite number"), ([1.0, float("inf")], "not a finite number"),
])
def test_bad_strengths_are_refused_and_change_nothing(model, strengths, problem):
    lora.compose(model, [(file(), 1.0), (file(1), 1.0)])
    before = bits(model)
    with pytest.raises(lora.PlanError, match=problem):
        lora.set_strengths(model, strengths)
    assert same(bits(model), before) and [entry.strength for entry in lora.composed(model)] == [1.0, 1.0]


@pytest.mark.parametrize("strengths", [0.5, None, {0: 1.0, 1: 1.0}, {0.5, 1.0}, "11"])
def test_what_is_no_list_of_strengths_is_refused_and_changes_nothing(model, strengths):
    lora.compose(model, [(file(), 1.0), (file(1), 1.0)])
    with pytest.raises(lora.PlanError, match="given as a list of numbers"):
        lora.set_strengths(model, strengths)
    assert [entry.strength for entry in lora.composed(model)] == [1.0, 1.0]


def test_stacks_and_strengths_may_come_from_generators(model):
    lora.compose(model, ((file(seed), 1.0) for seed in (0, 1)))
    lora.set_strengths(model, (strength for strength in (0.5, 0.25)))
    assert [entry.strength for entry in lora.composed(model)] == [0.5, 0.25]


@pytest.mark.parametrize("function, arguments", [
    (lora.compose, [[]]), (lora.plan, [[]]), (lora.set_strengths, [[]]), (lora.reset, []), (lora.composed, []),
])
def test_what_is_no_model_is_refused(function, arguments):
    with pytest.raises(lora.PlanError, match="the model is a torch.nn.Module .*found NoneType"):
        function(None, *arguments)


def test_strengths_of_a_bare_model_are_refused(model):
    with pytest.raises(lora.PlanError, match="no LoRA is composed"):
        lora.set_strengths(model, [1.0])
    assert traces(model) == []


@pytest.mark.parametrize("dtype, huge", [(torch.float16, 1e6), (torch.bfloat16, 1e39), (torch.bfloat16, -1e39)])
def test_a_strength_that_the_dtype_cannot_hold_is_refused_before_anything_is_touched(dtype, huge):
    model = trees.qwen(dtype=dtype)
    bare = bits(model)
    with pytest.raises(lora.NonFiniteError, match=r"transformer_blocks.0.attn.to_qkv.* does not fit (b?float16)"):
        lora.compose(model, [(file(), 1.0), (file(1), huge)])
    assert same(bits(model), bare) and traces(model) == []
    lora.compose(model, [(file(), 1.0), (file(1), 1.0)])
    before = bits(model)
    with pytest.raises(lora.NonFiniteError, match="does not fit"):
        lora.set_strengths(model, [1.0, huge])
    assert same(bits(model), before)


def test_a_composed_model_can_be_copied_and_each_copy_reset_by_itself(model):
    before = bits(model)
    lora.compose(model, [(file(), 0.7)])
    composed = bits(model)
    twin = copy.deepcopy(model)
    assert same(bits(twin), composed) and lora.composed(twin) == lora.composed(model)
    lora.set_strengths(twin, [0.2])
    assert same(bits(model), composed)
    lora.reset(model)
    assert same(bits(model), before) and lora.composed(twin)[0].strength == 0.2
    lora.set_strengths(twin, [0.7])
    assert same(bits(twin), composed)
    lora.reset(twin)
    assert same(bits(twin), before) and traces(twin) == []


def test_a_composed_model_can_be_pickled(model):
    before = bits(model)
    opened = lora.open_lora(file())
    lora.compose(model, [(opened, 0.7)])
    stored = io.BytesIO()
    torch.save(model, stored)
    loaded = torch.load(io.BytesIO(stored.getvalue()), weights_only=False)
    assert same(bits(loaded), bits(model)) and lora.composed(loaded)[0].strength == 0.7
    lora.reset(loaded)
    assert same(bits(loaded), before)


def test_the_state_dict_has_the_names_that_it_had(model):
    before = list(model.state_dict())
    lora.compose(model, [(file(), 0.7)])
    assert list(model.state_dict()) == before


def test_models_that_share_parameters_do_not_see_each_others_loras(model):
    other = trees.qwen()
    for name, parameter in model.named_parameters():
        setattr(other.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], parameter)
    before, mine = bits(other), bits(model)
    lora.compose(model, [(file(), 1.0)])
    assert same(bits(other), before) and lora.composed(other) == ()
    lora.compose(other, [(file(1), 1.0)])
    lora.reset(model)
    assert [entry.strength for entry in lora.composed(other)] == [1.0]
    lora.reset(other)
    assert same(bits(other), before) and same(bits(model), mine)


def test_a_wrapped_model_is_the_same_model(model):
    wrapper = torch.nn.Module()
    wrapper.diffusion_model = model
    outer = torch.nn.Module()
    outer.model = wrapper
    before = bits(model)
    lora.compose(outer, [(file(), 1.0)])
    assert lora.composed(model) == lora.composed(outer) != ()
    lora.reset(model)
    assert same(bits(model), before) and lora.composed(outer) == ()


def test_a_model_without_a_known_transformer_is_refused():
    with pytest.raises(lora.PlanError, match="Linear holds no Qwen-Image or Z-Image transformer"):
        lora.compose(torch.nn.Linear(2, 2), [(file(), 1.0)])


class TestSetAside:
    def test_the_base_stands_again_and_the_same_files_come_back_without_work(self, model):
        before, opened = bits(model), [lora.open_lora(file()), lora.open_lora(file(1))]
        lora.compose(model, [(one, 0.7) for one in opened])
        composed = bits(model)
        lora.set_aside(model)
        assert same(bits(model), before) and lora.composed(model) == ()
        report = lora.compose(model, [(one, 0.7) for one in opened])
        assert not report.computed and same(bits(model), composed)
        assert [entry.file for entry in lora.composed(model)] == opened

    def test_other_strengths_only_rescale(self, model):
        opened = lora.open_lora(file())
        lora.compose(model, [(opened, 0.7)])
        lora.set_aside(model)
        assert not lora.compose(model, [(opened, 0.2)]).computed
        rescaled = bits(model)
        lora.reset(model)
        assert lora.compose(model, [(opened, 0.2)]).computed
        assert same(bits(model), rescaled)

    def test_other_files_or_options_or_a_new_base_are_worked_out(self, model):
        opened = lora.open_lora(file())
        for loras, options, base in (([(opened, 1.0), (opened, 1.0)], {}, False),
                                     ([(opened, 1.0)], {"max_rank": 7}, False),
                                     ([(opened, 1.0)], {}, True)):
            lora.compose(model, [(opened, 1.0)])
            lora.set_aside(model)
            if base:
                layer = model.get_submodule(NAMES[0])
                layer.proj_up = torch.nn.Parameter(layer.proj_up.detach() * 2)
            assert lora.compose(model, loras, **options).computed

    def test_reset_forgets_it(self, model):
        opened = lora.open_lora(file())
        lora.compose(model, [(opened, 1.0)])
        lora.set_aside(model)
        lora.reset(model)
        assert traces(model) == []
        assert lora.compose(model, [(opened, 1.0)]).computed

    def test_a_strength_that_does_not_fit_leaves_it_aside(self, model):
        before, opened = bits(model), lora.open_lora(file())
        lora.compose(model, [(opened, 1.0)])
        lora.set_aside(model)
        with pytest.raises(lora.NonFiniteError):
            lora.compose(model, [(opened, 1e39)])
        assert same(bits(model), before) and lora.composed(model) == ()
        assert not lora.compose(model, [(opened, 1.0)]).computed

    @pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
    def test_an_error_while_it_is_rescaled_leaves_it_aside(self, model, monkeypatch, error):
        before, opened = bits(model), lora.open_lora(file())
        lora.compose(model, [(opened, 1.0)])
        lora.set_aside(model)
        with monkeypatch.context() as patched, pytest.raises(error):
            patched.setattr("qpatch.lora.modules.blocks.Blocks.prepare", Mock(side_effect=error))
            lora.compose(model, [(opened, 0.5)])
        assert same(bits(model), before) and lora.composed(model) == ()
        assert not lora.compose(model, [(opened, 1.0)]).computed


def test_the_same_opened_files_again_only_rescale(model):
    opened = lora.open_lora(file())
    lora.compose(model, [(opened, 1.0)])
    up = model.get_submodule(NAMES[0]).proj_up
    assert not lora.compose(model, [(opened, 0.5)]).computed
    assert model.get_submodule(NAMES[0]).proj_up is up
    # A path may hold another file by now.
    assert lora.compose(model, [(file(), 0.5)]).computed


@pytest.mark.parametrize("name", ["proj_out", "transformer_blocks.0.attn.to_out.0"])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_strength_beyond_float32_is_refused_for_every_kind_of_layer(model, name, value):
    before, layer = bits(model), model.get_submodule(name)
    tensors = {f"{name}.lora_A.weight": torch.ones(2, layer.in_features),
               f"{name}.lora_B.weight": torch.full((layer.out_features, 2), value)}
    with pytest.raises(lora.NonFiniteError, match=name):
        lora.compose(model, [(tensors, 1e39)])
    assert same(bits(model), before)


@pytest.mark.parametrize("kind", ["dora", "oft"])
def test_what_is_not_linear_in_its_strength_is_worked_out_again_by_compose_only(kind):
    torch.manual_seed(0)
    model = trees.qwen(h=128, f=128)
    dims = {**trees.QWEN_DIMS, "h": 128, "m": 768, "n": 256}
    opened = lora.open_lora(producers.make("simpletuner lycoris", "qwen-image", kind, dims=dims).tensors)
    lora.compose(model, [(opened, 1.0)])
    before = bits(model)
    with pytest.raises(lora.PlanError, match="compose again"):
        lora.set_strengths(model, [0.5])
    assert same(bits(model), before)
    assert lora.compose(model, [(opened, 0.5)]).computed
    assert not same(bits(model), before)


def test_a_lora_is_fixed_to_its_strength_by_one_after_it_that_looks_at_the_weight():
    torch.manual_seed(0)
    model = trees.qwen(h=128, f=128)
    dims = {**trees.QWEN_DIMS, "h": 128, "m": 768, "n": 256}
    looking, plain = (lora.open_lora(producers.make("simpletuner lycoris", "qwen-image", kind, dims=dims).tensors)
                      for kind in ("dora", "lora"))
    lora.compose(model, [(plain, 1.0), (looking, 0.5)])
    before = bits(model)
    with pytest.raises(lora.PlanError, match="one after it depends on the weight"):
        lora.set_strengths(model, [0.5, 0.5])
    assert same(bits(model), before)
    assert lora.compose(model, [(plain, 0.5), (looking, 0.5)]).computed
    lora.compose(model, [(looking, 0.5), (plain, 1.0)])
    lora.set_strengths(model, [0.5, 0.25])
