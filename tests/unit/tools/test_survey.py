"""What a file is said to be: layers, kinds, scales, norms, who made it. Norms against dense float64 references."""

import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import producers
import pytest
import torch
from safetensors.torch import load_file, save_file

from qpatch.lora import FileError, UnknownFamily
from qpatch.lora.inspection import gram, measure, measuring, survey
from qpatch.lora.inspection.metadata import about
from qpatch.lora.inspection.trainer import maker
from qpatch.lora.source import FileSource

CASES = [(name, family, kind) for name, rules in producers.PRODUCERS.items()
         for family in rules.families for kind in rules.kinds]

#: Producer -> what its files must be said to be made by: the whole answer may name others that spell keys alike.
MAKERS = {
    "musubi": "musubi-tuner", "musubi other": "musubi-tuner", "musubi comfy": "musubi-tuner",
    "ai-toolkit": "ai-toolkit", "ai-toolkit old lokr": "ai-toolkit", "onetrainer legacy": "OneTrainer",
    "onetrainer diffusers": "OneTrainer", "onetrainer kohya": "OneTrainer", "onetrainer original": "OneTrainer",
    "onetrainer comfy": "OneTrainer", "diffusion-pipe": "diffusion-pipe", "diffsynth": "DiffSynth",
    "diffsynth pipe": "DiffSynth", "simpletuner": "SimpleTuner", "simpletuner comfyui": "SimpleTuner",
    "simpletuner lycoris": "SimpleTuner", "flymyai": "FlyMyAI", "peft": "PEFT", "peft nested": "PEFT",
    "lightning": "Lightning", "videox-fun": "VideoX-Fun", "kohya fused": "bdsqlsz", "anime-z": "Anime-Z",
    "blissful": "blissful-tuner", "turbo training adapter": "ai-toolkit", "mochi style": "diffusers",
    "old diffusers": "diffusers", "older diffusers": "diffusers", "comfyui extract": "ComfyUI",
    "lora_transformer": "OneTrainer", "invokeai": "InvokeAI",
}


@pytest.mark.parametrize(("producer", "family", "kind"), CASES)
def test_norms_of_every_format_are_those_of_the_dense_change(producer, family, kind, written):
    example, path = written(producer, family, kind, rank=3)
    found = measure(survey(path))
    assert found.family.name == family and not found.problems and not found.unknown
    assert {str(facts.target) for facts in found.layers} == set(example.layers)
    for facts in found.layers:
        sample = example.layers[str(facts.target)]
        if sample.change is None:
            assert facts.norm == 0 and facts.note == "changes the bias only"
        elif not sample.needs_base:
            dense = sample.change(example.base(str(facts.target)), 1.0)
            assert facts.norm == pytest.approx(np.linalg.norm(dense), rel=1e-6)
            blocks = np.split(dense, len(facts.spots))
            assert facts.spot_norms == pytest.approx([np.linalg.norm(block) for block in blocks], rel=1e-6)
            assert facts.rms(0) == pytest.approx(np.sqrt(np.mean(blocks[0] ** 2)), rel=1e-6)
        elif not facts.dora:
            assert facts.norm is None and "base weight" in facts.note


def test_a_dora_layer_has_the_norm_of_what_its_magnitude_scales(written):
    plain, path = written("simpletuner lycoris", kind="lora", name="plain.safetensors")
    example, dora = written("simpletuner lycoris", kind="dora", name="dora.safetensors")
    tensors = load_file(dora)
    save_file({key: load_file(path).get(key, tensor) for key, tensor in tensors.items()}, dora)
    with_magnitude, without = measure(survey(dora)), measure(survey(path))
    assert [facts.norm for facts in with_magnitude.layers] == [facts.norm for facts in without.layers]
    assert all(facts.dora and "magnitude" in facts.note for facts in with_magnitude.layers)


@pytest.mark.parametrize("producer", producers.PRODUCERS)
def test_the_maker_is_named_from_keys_alone(producer):
    rules = producers.PRODUCERS[producer]
    for kind in rules.kinds:
        example = producers.make(producer, rules.families[0], kind)
        assert MAKERS[producer] in maker(example.metadata, example.tensors).name


@pytest.mark.parametrize(("metadata", "name"), [
    ({"software": json.dumps({"name": "ai-toolkit", "version": "0.7.3"})}, "ai-toolkit 0.7.3"),
    ({"ot_branch": "master", "ot_revision": "abc"}, "OneTrainer (branch master)"),
    ({"ss_network_module": "networks.lora_qwen_image"}, "musubi-tuner"),
    ({"ss_network_module": "lycoris.kohya"}, "LyCORIS in sd-scripts or musubi-tuner"),
])
def test_metadata_that_names_the_maker_is_believed_before_the_keys(metadata, name):
    found = maker(metadata, ["diffusion_model.layers.0.attention.to_q.lora_A.weight"])
    assert (found.name, found.sure) == (name, True)


def test_keys_of_no_known_program_are_said_to_be_unknown():
    assert maker({}, ["something.else"]).name == "unknown"


def test_trigger_words_and_training_are_read_from_the_metadata():
    found = about({
        "modelspec.trigger_phrase": "ohwx man",
        "ss_tag_frequency": json.dumps({"5_a": {"ohwx man": 3, "hat": 1}, "1_b": {"hat": 4}}),
        "ss_output_name": "style_v2", "ss_base_model_version": "qwen_image", "training_info": json.dumps({"step": 900}),
        "ss_training_comment": "None", "ss_epoch": "not\na  number" * 60,
    })
    assert found.triggers == ["ohwx man"] and found.tags == [("hat", 5), ("ohwx man", 3)]
    assert found.facts["title"] == "style_v2" and found.facts["base model"] == "qwen_image"
    assert found.facts["steps"] == "900"
    assert "note" not in found.facts and "\n" not in found.facts["epochs"] and len(found.facts["epochs"]) == 300


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', '{"a": {"tag": "many"}}', '{"a": {" ": 3}}'])
def test_a_tag_table_of_another_form_is_left_out(text):
    assert about({"ss_tag_frequency": text}).tags == []


def test_alpha_scale_and_the_rule_are_those_of_the_file(written):
    _, path = written("lightning", "qwen-image", rank=8, alpha=1.0)
    facts = survey(path).layers[0]
    assert (facts.rank, facts.alpha, facts.scale, facts.rule) == (8, 1.0, 0.125, "alpha 1 / rank 8")


def test_a_listing_reads_no_tensor_and_imports_no_torch(written):
    _, path = written("musubi", "qwen-image", rank=2)
    code = ("import sys; from qpatch.cli import main; code = main(['lora', 'inspect', '--no-norms', sys.argv[1]]);"
            "print('torch._C' in sys.modules, code)")
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False 0", done.stderr


def test_nan_in_a_layer_is_a_problem_of_that_layer_only(written):
    example, path = written()
    key = next(key for key in example.tensors if "layers.0.attention.to_k.lora_B" in key)
    tensors = load_file(path)
    tensors[key][1, 1] = torch.nan
    save_file(tensors, path)
    found = measure(survey(path))
    assert len(found.problems) == 1 and key in found.problems[0] and "NaN" in found.problems[0]
    assert [str(facts.target) for facts in found.layers if facts.norm is None] == ["layers.0.attention.qkv[k]"]


def test_large_finite_factors_are_measured_in_float64(written):
    _, path = written(rank=1)
    tensors = {key: torch.full_like(tensor, 1e25 if "lora_B" in key else 1.0)
               for key, tensor in load_file(path).items()}
    save_file(tensors, path)
    found = measure(survey(path))
    out, inp = found.layers[0].shape
    assert not found.problems and found.layers[0].norm == pytest.approx(1e25 * (out * inp) ** 0.5, rel=1e-6)


def test_small_factors_are_measured_in_float64_where_their_squares_vanish(written):
    _, path = written(rank=1)
    tensors = {key: torch.full_like(tensor, 1e-25 if "lora_B" in key else 1.0)
               for key, tensor in load_file(path).items()}
    save_file(tensors, path)
    layer = measure(survey(path)).layers[0]
    assert layer.norm == pytest.approx(1e-25 * math.prod(layer.shape) ** 0.5, rel=1e-6)


def pair_of_layers(path, dtype, values, rank=96, size=160):
    """Two layers, one fused of three parts, whose factors do not lie side by side in the file; their dense norms."""
    generator, tensors, norms = torch.Generator().manual_seed(0), {}, []
    for name, out in (("to_out.0", size), ("qkv", 3 * size)):
        down, up = (values(torch.randn(shape, generator=generator)).to(dtype) for shape in ((rank, size), (out, rank)))
        stem = f"diffusion_model.layers.0.attention.{name}"
        tensors |= {f"{stem}.lora_B.weight": up, f"{stem}.lora_A.weight": down}
        dense = up.double() @ down.double()
        norms.append([block.norm().item() for block in dense.split(size)])
    tensors["diffusion_model.layers.0.attention.to_out.0.alpha"] = torch.tensor(float(rank), dtype=torch.float64)
    save_file(tensors, path)
    return norms


def by_target(found):
    return [facts.spot_norms for facts in sorted(found.layers, key=lambda facts: len(facts.spots))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("limit", [gram.PAIR, 0], ids=["whole", "in pieces"])
def test_norms_of_higher_ranks_are_right_whole_and_in_pieces_for_each_dtype(dtype, limit, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "PAIR", limit)
    monkeypatch.setattr(measuring, "BLOCK", 5000)
    monkeypatch.setattr(gram, "NUMBERS", 3000)
    norms = pair_of_layers(tmp_path / "x.safetensors", dtype, lambda values: values)
    found = by_target(measure(survey(tmp_path / "x.safetensors")))
    assert [pytest.approx(wanted, rel=1e-6) for wanted in norms] == found


def test_float32_factors_are_never_rounded_to_bfloat16(tmp_path):
    """Each number lies between two of bfloat16; rounded, all would err to the same side."""
    norms = pair_of_layers(tmp_path / "x.safetensors", torch.float32, lambda values: torch.full_like(values, 1 + 2**-9))
    found = by_target(measure(survey(tmp_path / "x.safetensors")))
    assert [pytest.approx(wanted, rel=1e-5) for wanted in norms] == found


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="this torch has no such setting")
def test_the_precision_of_torch_is_what_it_was_after_norms_and_after_an_interruption(tmp_path):
    path, settings = tmp_path / "x.safetensors", torch.backends.mkldnn.matmul
    pair_of_layers(path, torch.bfloat16, lambda values: values)
    before, seen = settings.fp32_precision, []

    def interrupt(*_):
        seen.append(settings.fp32_precision)
        raise KeyboardInterrupt

    measure(survey(path))
    assert settings.fp32_precision == before
    with pytest.raises(KeyboardInterrupt):
        measure(survey(path), lambda done, total: interrupt() if done else None)
    assert seen == ["bf16"] and settings.fp32_precision == before


def test_where_the_system_cannot_read_at_a_place_norms_are_the_same(tmp_path, monkeypatch):
    norms = pair_of_layers(tmp_path / "x.safetensors", torch.bfloat16, lambda values: values)
    for name in ("preadv", "posix_fadvise"):
        monkeypatch.delattr(os, name, raising=False)
    found = by_target(measure(survey(tmp_path / "x.safetensors")))
    assert [pytest.approx(wanted, rel=1e-6) for wanted in norms] == found


def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(written):
    _, path = written()
    found = survey(path)
    path.write_bytes(path.read_bytes()[:-4000])
    problems = measure(found).problems
    assert problems and all("shorter" in problem and str(path.name) in problem for problem in problems)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
                                   torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool])
def test_numbers_and_tensors_are_read_as_safetensors_reads_them(dtype, tmp_path):
    many = torch.arange(24).reshape(4, 3, 2) / 2
    tensors = {"one": torch.tensor(1.5).to(dtype), "many": many.to(dtype), "none": torch.empty(0, 3).to(dtype)}
    save_file(tensors, tmp_path / "x.safetensors")
    with FileSource(tmp_path / "x.safetensors") as reader:
        assert reader.number("one") == float(tensors["one"].float())
        for key, tensor in tensors.items():
            read = reader.tensor(key)
            assert read.dtype == dtype and read.shape == tensor.shape and read.float().equal(tensor.float())
        memory = bytearray(2 * many[0].numel() * tensors["many"].element_size())
        reader.read_rows("many", 1, 3, memoryview(memory))
        assert torch.frombuffer(memory, dtype=dtype).float().equal(tensors["many"][1:3].flatten().float())


def test_a_fused_layer_covers_the_cells_of_its_parts(written):
    _, path = written("diffusion-pipe", "z-image")
    fused = next(facts for facts in survey(path).layers if str(facts.target) == "layers.0.attention.qkv")
    assert [spot.component.label for spot in fused.spots] == ["attention.to_q", "attention.to_k", "attention.to_v"]


def test_a_file_of_another_family_than_asked_for_is_refused(written):
    _, path = written("ai-toolkit", "z-image")
    with pytest.raises(UnknownFamily, match="Qwen-Image"):
        survey(path, "qwen-image")


def test_a_bad_file_is_refused_and_not_kept_open(tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"PK\x03\x04 something")
    with pytest.raises(FileError, match=re.escape("bad.safetensors")):
        survey(path)


def test_norms_are_the_same_on_any_number_of_threads_and_torch_keeps_its_own(written):
    _, path = written("ai-toolkit", "z-image", blocks=3)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append([facts.spot_norms for facts in measure(survey(path)).layers])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]
