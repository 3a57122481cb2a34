"""What a plan refuses, what it leaves out and says, stacks with a bad file, reports, progress."""

import logging
import sys
import types

import producers
import pytest
import torch
import trees
from safetensors.torch import save_file
from test_composition import bits, same, traces

from qpatch import lora
from qpatch.lora import progress

LAYER = "transformer_blocks.0.attn.to_out.0"


@pytest.fixture
def model():
    torch.manual_seed(0)
    return trees.qwen()


def pair(name=LAYER, rank=4, out=64, inp=64, lead="transformer."):
    generator = torch.Generator().manual_seed(out + inp + rank)
    return {f"{lead}{name}.lora_A.weight": torch.randn(rank, inp, generator=generator),
            f"{lead}{name}.lora_B.weight": torch.randn(out, rank, generator=generator)}


def edited(tensors, role, change):
    key = next(key for key in tensors if role in key)
    return {**tensors, key: change(tensors[key].clone())}, key


def nan(tensor):
    tensor[0, 0] = float("nan")
    return tensor


def convolution(tensor):
    return tensor[:, :, None, None].expand(-1, -1, 3, 3).contiguous()


MALFORMED = {
    "NaN": (lambda: edited(pair(), "lora_A", nan), lora.NonFiniteError),
    "Inf": (lambda: edited(pair(), "lora_B", lambda tensor: tensor.fill_(float("inf"))), lora.NonFiniteError),
    "zero rank": (lambda: edited(pair(rank=4), "lora_A", lambda tensor: tensor[:0]), lora.ShapeError),
    "transposed": (lambda: edited(pair(), "lora_A", lambda tensor: tensor.T.contiguous()), lora.ShapeError),
    "four dimensions": (lambda: edited(pair(), "lora_A", convolution), lora.ShapeError),
    "another size": (lambda: (pair(out=32, inp=32), f"transformer.{LAYER}.lora_A.weight"), lora.ShapeError),
    "swapped": (lambda: (dict(zip(pair(), reversed(pair().values()))), f"transformer.{LAYER}.lora_A.weight"),
                lora.ShapeError),
}


@pytest.mark.parametrize("fault", MALFORMED)
@pytest.mark.parametrize("form", ["file", "dict"])
def test_a_malformed_lora_is_refused_with_file_and_key_and_the_model_untouched(model, tmp_path, fault, form):
    make, kind = MALFORMED[fault]
    tensors, key = make()
    source, name = tensors, "<dict>"
    if form == "file":
        source = tmp_path / "broken.safetensors"
        save_file(tensors, source)
        name = source.name
    before = bits(model)
    with pytest.raises(kind) as caught:
        lora.compose(model, [(source, 1.0)])
    error = caught.value
    assert isinstance(error, lora.LoraError) and error.file == name and error.key.rpartition(".lora")[0] in key
    assert name in str(error) and error.key in str(error)
    assert same(bits(model), before) and traces(model) == []


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{}", b"PK\x03\x04" + b"\0" * 100, b"\x80\x02}q\0."])
def test_what_is_no_safetensors_file_is_refused(model, tmp_path, content):
    path = tmp_path / "something.safetensors"
    path.write_bytes(content)
    with pytest.raises(lora.FileError, match="something.safetensors"):
        lora.compose(model, [(path, 1.0)])
    with pytest.raises(lora.FileError):
        lora.compose(model, [(tmp_path, 1.0)])
    with pytest.raises(lora.FileError, match="gone"):
        lora.compose(model, [(tmp_path / "gone.safetensors", 1.0)])


@pytest.mark.parametrize("loras, problem", [
    ([(7, 1.0)], "a LoRA is a path, a dict of tensors or a LoraFile"), ([({}, 1.0)], "no tensors"),
    ([(pair(), float("nan"))], "not a finite number"), ([(pair(), None)], "not a finite number"),
    ([(pair(), 10**400)], "not a finite number"),
    (None, "list of pairs"), ([3], "list of pairs"), ([(pair(), 1.0, 1.0)], "list of pairs"),
])
def test_a_request_that_makes_no_sense_is_refused(model, loras, problem):
    for request in (lora.plan, lora.compose):
        with pytest.raises(lora.LoraError, match=problem) as caught:
            request(model, loras)
        assert "tensor(" not in str(caught.value)


def test_loras_may_come_from_a_generator(model):
    assert lora.compose(model, ((pair(), strength) for strength in (1.0, 0.5))).complete
    assert [entry.strength for entry in lora.composed(model)] == [1.0, 0.5]


@pytest.mark.parametrize("rank", [0, 1.5, "8", None])
def test_a_rank_budget_that_is_no_positive_number_is_refused(model, rank):
    with pytest.raises(lora.PlanError, match="max_rank is a positive number"):
        lora.compose(model, [(pair(), 1.0)], max_rank=rank)


def test_a_plan_for_a_module_that_was_exchanged_since_is_refused(model):
    planned = lora.plan(model, [(pair(), 1.0)])
    model.transformer_blocks[0].attn.to_out[0] = trees.qwen().get_submodule(LAYER)
    before = bits(model)
    with pytest.raises(lora.PlanError, match=f"{LAYER}: the module was exchanged"):
        planned.apply()
    assert same(bits(model), before) and traces(model) == []


def test_a_lora_of_another_family_is_refused(model):
    example = producers.make("musubi", "z-image", dims=trees.Z_DIMS)
    with pytest.raises(lora.UnknownFamily, match="expected Qwen-Image, found Z-Image"):
        lora.compose(model, [(example.tensors, 1.0)])
    with pytest.raises(lora.UnknownFamily, match="expected Qwen-Image, found Z-Image"):
        lora.compose(model, [(lora.open_lora(example.tensors), 1.0)])


def test_a_lora_of_which_no_layer_fits_is_refused(model):
    with pytest.raises(lora.PlanError, match="no layer of the file fits this model: .*transformer_blocks.7"):
        lora.compose(model, [(pair("transformer_blocks.7.attn.to_out.0"), 1.0)])


def test_a_layer_whose_weight_is_not_loaded_yet_is_refused_by_name(model):
    model.img_in.weight = None
    before = bits(model)
    with pytest.raises(lora.PlanError, match="img_in: the layer has no weight yet"):
        lora.compose(model, [(pair("img_in", out=64, inp=16), 1.0), (pair(), 1.0)])
    assert same(bits(model), before)
    assert lora.compose(model, [(pair(), 1.0)]).complete


@pytest.mark.parametrize("layer, out, inp", [
    ("img_in", 64, 16), ("transformer_blocks.0.attn.to_add_out", 64, 64), ("transformer_blocks.0.img_mod.1", 384, 64)])
def test_a_layer_on_the_meta_device_is_refused_by_name(model, layer, out, inp):
    model.get_submodule(layer).to("meta")
    with pytest.raises(lora.PlanError, match=f"{layer}: the layer has no weight yet"):
        lora.compose(model, [(pair(layer, out=out, inp=inp), 1.0)])


class TestStacks:
    def test_a_bad_file_is_left_out_and_said_and_the_others_apply(self, model, tmp_path, caplog):
        broken = tmp_path / "broken.safetensors"
        broken.write_bytes(b"nothing")
        alone = trees.qwen()
        alone.load_state_dict(model.state_dict())
        with caplog.at_level(logging.INFO, "qpatch.lora"):
            report = lora.compose(model, [(pair(), 0.5), (broken, 1.0), (MALFORMED["NaN"][0]()[0], 1.0)])
        lora.compose(alone, [(pair(), 0.5)])
        assert all(torch.equal(one, other)
                   for one, other in zip(model.state_dict().values(), alone.state_dict().values()))
        assert [file.problem is None for file in report.files] == [True, False, False]
        assert isinstance(report.files[1].error, lora.FileError) and "broken.safetensors" in report.files[1].problem
        assert "broken.safetensors: not applied" in caplog.text and not report.complete
        assert len(lora.composed(model)) == 1
        lora.set_strengths(model, [0.25])

    def test_strictly_one_bad_file_refuses_them_all(self, model):
        with pytest.raises(lora.NonFiniteError):
            lora.compose(model, [(pair(), 0.5), (MALFORMED["NaN"][0]()[0], 1.0)], strict=True)
        assert lora.composed(model) == ()

    def test_if_all_are_bad_the_first_problem_is_raised(self, model):
        with pytest.raises(lora.NonFiniteError):
            lora.compose(model, [(MALFORMED["NaN"][0]()[0], 1.0), ({}, 1.0)])

    def test_opened_files_again_skip_the_refused_ones(self, model):
        good, bad = lora.open_lora(pair()), lora.open_lora(MALFORMED["NaN"][0]()[0])
        assert lora.compose(model, [(bad, 1.0), (good, 0.5)]).computed
        report = lora.compose(model, [(bad, 2.0), (good, 0.25)])
        assert not report.computed and lora.composed(model)[0].strength == 0.25 and report.files[1].strength == 0.25


class TestReports:
    def test_every_layer_has_its_line_with_rank_and_scale(self, model):
        tensors = {**pair(), f"transformer.{LAYER}.alpha": torch.tensor(2.0)}
        text = str(lora.compose(model, [(tensors, 0.5)]))
        assert f"[APPLY] {LAYER} <- {LAYER} (rank 4, scale 0.25" in text
        assert "<dict> at 0.5: 1 of 1 layers applied, 100 % of the delta norm" in text
        lora.set_strengths(model, [1.0])

    def test_the_share_of_the_delta_norm_that_took_effect_is_measured(self, model):
        layers = [f"transformer_blocks.{block}.attn.to_out.0" for block in (0, 1)]
        tensors = {**pair(layers[0]), **pair(layers[1])}
        size = tensors[f"transformer.{layers[1]}.lora_B.weight"]
        size.mul_(3)
        file = lora.compose(model, [(tensors, 1.0)]).files[0]
        assert (file.applied, file.total) == (1, 2) and abs(file.share - 0.25) < 1e-6
        assert "1 of 2 layers applied, 25.0 % of the delta norm" in file.summary()

    def test_keys_that_map_nowhere_are_layers_that_were_missed(self, model):
        tensors = {**pair(), **pair("transformer_blocks.0.attn.to_qq")}
        file = lora.compose(model, [(tensors, 1.0)]).files[0]
        assert (file.applied, file.total) == (1, 2)
        assert [key for key, _ in file.misses] == [key for key in tensors if "to_qq" in key]
        assert all("to_q" in reason for _, reason in file.misses)
        assert "[MISS] transformer.transformer_blocks.0.attn.to_qq.lora_A.weight: " in str(file)

    def test_text_encoder_keys_are_neither_layers_nor_misses(self, model):
        tensors = {**pair(), **pair("q_proj", lead="text_encoders.qwen25_7b.transformer.")}
        file = lora.compose(model, [(tensors, 1.0)]).files[0]
        assert (file.applied, file.total, file.misses, file.share) == (1, 1, [], 1.0)

    def test_a_file_of_a_text_encoder_alone_is_refused_with_one_of_its_keys(self, model):
        tensors = pair("q_proj", lead="text_encoders.qwen25_7b.transformer.")
        with pytest.raises(lora.PlanError, match="it holds no layers of the transformer") as refused:
            lora.compose(model, [(tensors, 1.0)])
        assert refused.value.key in tensors

    def test_a_bias_that_has_no_place_is_missed_and_the_weight_applied(self):
        root = trees.z_image()
        name = "layers.0.attention.out"
        tensors = {**pair(name, lead="diffusion_model."), f"diffusion_model.{name}.diff_b": torch.ones(64)}
        file = lora.compose(root, [(tensors, 1.0)]).files[0]
        assert file.applied == file.total == 1
        assert [reason for _, reason in file.misses] == [f"{name} has no bias: the change of the bias is left out"]

    def test_a_bias_of_another_length_is_refused(self, model):
        with pytest.raises(lora.ShapeError, match="the bias does not fit the layer"):
            lora.compose(model, [({f"diffusion_model.{LAYER}.diff_b": torch.ones(63)}, 1.0)])

    def test_long_lists_are_cut(self, model):
        tensors = {**pair()}
        for number in range(1, 31):
            tensors.update(pair(f"transformer_blocks.{number}.attn.to_out.0"))
        text = str(lora.compose(model, [(tensors, 1.0)]))
        assert text.count("[MISS]") == 20 and "... and 10 keys more" in text

    def test_what_is_written_to_the_log_can_be_switched_off(self, model, caplog):
        with caplog.at_level(logging.DEBUG, "qpatch.lora"):
            lora.compose(model, [(pair(), 1.0)], log=False)
            assert not caplog.records
            lora.compose(model, [(pair(), 1.0)])
        assert [record.levelname for record in caplog.records] == ["INFO", "DEBUG"]

    def test_an_adapter_that_needs_a_base_that_cannot_be_rebuilt_is_missed_with_that_reason(self, model):
        tensors = {**pair(), **pair("transformer_blocks.0.attn.to_add_out")}
        tensors[f"transformer.{LAYER}.dora_scale"] = torch.ones(64, 1)
        file = lora.compose(model, [(tensors, 1.0)]).files[0]
        assert file.applied == 1 and "cannot be rebuilt" in file.misses[0][1]


@pytest.mark.parametrize("shape", [(72, 64, 16), (64, 72, 16), (64, 64, 24)])
def test_a_layer_that_is_not_packed_in_whole_fragments_is_refused_by_name(model, shape):
    inp, out, rank = shape
    model.transformer_blocks[0].attn.to_out[0] = trees.SVDQW4A4Linear(inp, out, rank)
    with pytest.raises(lora.PlanError, match=rf"{LAYER}: .* found torch.bfloat16, {out} x {inp}, rank {rank}"):
        lora.compose(model, [(pair(out=out, inp=inp), 1.0)])


def run(total, progress_=None):
    with progress.Steps("a title", total, progress_) as steps:
        for _ in range(total):
            steps.step()


class TestProgress:
    def test_quick_loops_show_nothing(self, monkeypatch):
        monkeypatch.setattr(progress, "_bar", lambda *_: pytest.fail("a bar was made"))
        run(3)

    def test_comfyuis_bar_is_used_where_it_is_loaded(self, monkeypatch):
        seen = []
        bar = types.SimpleNamespace(update_absolute=lambda done, total: seen.append((done, total)))
        monkeypatch.setitem(sys.modules, "comfy.utils", types.SimpleNamespace(ProgressBar=lambda total: bar))
        monkeypatch.setattr(progress, "_DELAY", -1)
        run(2)
        assert seen == [(0, 2), (1, 2), (2, 2)]

    def test_a_terminal_gets_tqdm_and_anything_else_nothing(self, monkeypatch):
        pytest.importorskip("tqdm")
        monkeypatch.setattr(progress, "_DELAY", -1)
        for terminal in (True, False):
            written = []
            stream = types.SimpleNamespace(isatty=lambda terminal=terminal: terminal, write=written.append,
                                           flush=lambda: None)
            monkeypatch.setattr(sys, "stderr", stream)
            run(2)
            assert bool(written) is terminal

    def test_reading_a_file_has_a_bar_too_unless_the_caller_shows_progress(self, model, monkeypatch):
        made = []

        def bar(title, total):
            made.append(title)
            return (lambda done: None), (lambda: None)

        monkeypatch.setattr(progress, "_DELAY", -1)
        monkeypatch.setattr(progress, "_bar", bar)
        lora.plan(model, [(pair(), 1.0)])
        assert made == ["reading <dict>"]
        lora.compose(model, [(pair(), 1.0)], progress=lambda done, total: None)
        assert len(made) == 1

    def test_the_callers_callback_takes_the_place_of_a_bar(self):
        seen = []
        run(2, lambda done, total: seen.append((done, total)))
        assert seen == [(0, 2), (1, 2), (2, 2)]
