"""All or nothing: errors and interruptions anywhere, several threads, memory that must not be written."""

import hashlib
import threading

import numpy as np
import producers
import pytest
import torch
import trees
from faults.interrupt import Interrupt
from test_composition import bits, objects, same, traces

from qpatch import lora
from qpatch.lora import composition, state
from qpatch.lora.modules import change, plain, svdq


@pytest.fixture
def model():
    torch.manual_seed(0)
    return trees.qwen(h=64, f=64)


def small(seed=0):
    dims = {**trees.QWEN_DIMS, "f": 64}
    return producers.make("peft", "qwen-image", rank=2, dims=dims, seed=seed).tensors


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("draft", [svdq.SVDQDraft, plain.LinearDraft])
def test_an_error_while_new_tensors_are_made_leaves_the_model_as_it_was(model, monkeypatch, error, draft):
    lora.compose(model, [(small(), 1.0)])
    before, ids = bits(model), objects(model)
    calls, build = [], draft.build

    def failing(self, rank=None):
        calls.append(self)
        if len(calls) == 3:
            raise error("no more")
        return build(self, rank)

    monkeypatch.setattr(draft, "build", failing)
    with pytest.raises(error):
        lora.compose(model, [(small(1), 1.0)])
    assert same(bits(model), before) and objects(model) == ids
    assert [entry.strength for entry in lora.composed(model)] == [1.0]


#: The code that puts compositions in place.
CODE = composition.__file__, change.__file__, state.__file__


def interrupted(function, line):
    """Run ``function``, interrupted at a line; whether there was such a line."""
    try:
        with Interrupt(line, *CODE) as interrupt:
            function()
    except KeyboardInterrupt:
        return True
    assert interrupt.left > 0
    return False


def one_layer(model):
    """Only a few layers, so that every line can be tried."""
    keys = ("attn.to_out.0", "img_mod.1", "img_in")
    return {key: value for key, value in small().items() if any(name in key for name in keys)}


@pytest.mark.parametrize("action", ["compose", "replace", "reset", "set_aside"])
def test_an_interruption_at_any_line_leaves_all_or_nothing(model, action):
    bare, ids = bits(model), objects(model)
    first, second = lora.open_lora(one_layer(model)), lora.open_lora(one_layer(model))
    lora.compose(model, [(first, 1.0)])
    composed = bits(model)
    lora.compose(model, [(second, 0.5)])
    other = bits(model)
    lora.reset(model)
    start = {"compose": [], "replace": [(first, 1.0)], "reset": [(first, 1.0)], "set_aside": [(first, 1.0)]}[action]
    run = {"compose": lambda: lora.compose(model, [(first, 1.0)]),
           "replace": lambda: lora.compose(model, [(second, 0.5)]),
           "reset": lambda: lora.reset(model), "set_aside": lambda: lora.set_aside(model)}[action]
    ends = {"compose": (bare, composed), "replace": (composed, other),
            "reset": (composed, bare), "set_aside": (composed, bare)}
    line = 0
    while True:
        line += 1
        lora.compose(model, start)
        stopped = interrupted(run, line)
        now = bits(model)
        assert same(now, ends[action][0]) or same(now, ends[action][1]), line
        assert bool(lora.composed(model)) == (not same(now, bare)), line
        lora.reset(model)
        assert same(bits(model), bare) and objects(model) == ids and traces(model) == [], line
        if not stopped:
            break
    assert line > 30


def test_an_interrupted_change_of_strengths_leaves_the_old_ones_or_the_new(model):
    lora.compose(model, [(small(), 1.0)])
    old = bits(model)
    lora.set_strengths(model, [0.5])
    new = bits(model)
    for line in range(1, 200, 3):
        lora.set_strengths(model, [1.0])
        stopped = interrupted(lambda: lora.set_strengths(model, [0.5]), line)
        strength = lora.composed(model)[0].strength
        assert same(bits(model), {1.0: old, 0.5: new}[strength]), line
        if not stopped:
            break


@pytest.mark.parametrize("undone", range(8))
def test_a_second_interruption_while_undoing_is_mended_by_the_next_call(model, monkeypatch, undone):
    bare, ids = bits(model), objects(model)
    lora.compose(model, [(small(), 1.0)])
    calls = {"install": 0, "remove": 0}

    def failing(name, action):
        """The fifth installation is interrupted, and then the undoing, after ``undone`` removals."""
        def call(self):
            calls[name] += 1
            if calls["install"] >= 5 and (name == "install" or calls["remove"] > removals + undone):
                raise KeyboardInterrupt
            action(self)
        return call

    removals = sum("_qpatch_lora_changes" in module.__dict__ for module in model.modules())
    for name in calls:
        monkeypatch.setattr(change.Change, name, failing(name, getattr(change.Change, name)))
    with pytest.raises(KeyboardInterrupt):
        lora.compose(model, [(small(1), 1.0)])
    monkeypatch.undo()
    lora.reset(model)
    assert same(bits(model), bare) and objects(model) == ids and traces(model) == []


def test_threads_that_compose_on_one_model_wait_for_each_other(model):
    files = [lora.open_lora(small(seed)) for seed in range(3)]
    ends = []
    for opened in files:
        lora.compose(model, [(opened, 1.0)])
        ends.append(bits(model))
    lora.reset(model)
    bare, problems = bits(model), []

    def work(number):
        try:
            for _ in range(6):
                lora.compose(model, [(files[number], 1.0)])
                if number == 0:
                    lora.reset(model)
        except Exception as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not problems and not any(thread.is_alive() for thread in threads)
    now = bits(model)
    assert any(same(now, end) for end in [bare, *ends])
    lora.reset(model)
    assert same(bits(model), bare) and traces(model) == []


def test_a_composition_that_calls_for_another_one_is_refused(model):
    def progress(done, total):
        with pytest.raises(lora.BusyError):
            lora.reset(model)
        seen.append((done, total))

    seen = []
    lora.compose(model, [(small(), 1.0)], progress=progress)
    assert seen[0][0] == 0 and seen[-1] == (seen[-1][1],) * 2


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_weights_that_are_a_read_only_mapping_of_a_file_are_never_written(model, tmp_path):
    """Writing to one would end the process."""
    for name, parameter in list(model.named_parameters()):
        stored = tmp_path / name
        stored.write_bytes(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        with open(stored, "rb"):
            mapped = np.memmap(stored, dtype=np.uint8, mode="r")
        parameter.data = torch.from_numpy(mapped).view(parameter.dtype).view(parameter.shape)
    files = sorted(tmp_path.iterdir())
    sums = [hashlib.sha256(one.read_bytes()).hexdigest() for one in files]
    before = bits(model)
    lora.compose(model, [(small(), 1.0), (small(1), -2.0)])
    lora.set_strengths(model, [0.0, 1.0])
    lora.reset(model)
    assert same(bits(model), before)
    assert [hashlib.sha256(one.read_bytes()).hexdigest() for one in files] == sums


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_composed_factor_that_was_replaced_by_a_mapping_is_not_written_either(model, tmp_path):
    """As after a composed checkpoint was saved and loaded into the model again."""
    lora.compose(model, [(small(), 1.0)])
    up = model.get_submodule("transformer_blocks.0.attn.to_out.0").proj_up
    stored = tmp_path / "factor"
    stored.write_bytes(up.detach().view(torch.uint8).numpy().tobytes())
    before = stored.read_bytes()
    up.data = torch.from_numpy(np.memmap(stored, dtype=np.uint8, mode="r")).view(up.dtype).view(up.shape)
    lora.set_strengths(model, [0.5])
    halved = bits(model)
    lora.compose(model, [(small(), 0.5)])
    assert same(bits(model), halved) and stored.read_bytes() == before


@pytest.mark.parametrize("inside", [True, False])
def test_models_made_and_composed_in_inference_mode_can_be_changed_outside_of_it(inside):
    with torch.inference_mode(inside):
        torch.manual_seed(0)
        model = trees.qwen(h=64, f=64)
        lora.compose(model, [(small(), 1.0)])
    composed = bits(model)
    lora.set_strengths(model, [0.5])
    with torch.inference_mode():
        lora.set_strengths(model, [1.0])
    assert same(bits(model), composed)
    lora.reset(model)
    assert traces(model) == []
