"""``qpatch lora convert`` and ``merge``: files whole or not at all, never over an input, one line for an error."""

import json
import os
import sys

import pytest
import torch
from dense_changes import changes, largest_error
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qpatch.lora import open_lora


def folder(path):
    return {entry.name: entry.read_bytes() for entry in path.iterdir()}


def test_a_converted_file_says_where_it_comes_from_and_that_it_is_exact(command, written, tmp_path):
    _, path = written("musubi", "z-image", alpha=1.0)
    code, out, err = command("convert", path, "-o", tmp_path / "out.safetensors", "--to", "comfyui")
    assert code == 0 and err == "" and "exact" in out
    assert largest_error(changes(open_lora(path)), changes(open_lora(tmp_path / "out.safetensors"))) == 0
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        (step,) = json.loads(file.metadata()["qpatch.history"])
    assert step["sources"] == [{"name": "style.safetensors", "strength": 1.0}] and step["by"].startswith("qpatch ")


def test_a_smaller_rank_states_the_error_and_the_worst_layers(command, written, tmp_path):
    _, path = written("musubi", "z-image", rank=6)
    code, out, _ = command("convert", path, "-o", tmp_path / "out.safetensors", "--to", "kohya", "--rank", 2,
                           "--precision", "bf16")
    assert code == 0 and "error: " in out and "%" in out
    code, out, _ = command("convert", path, "-o", tmp_path / "b.safetensors", "--to", "kohya", "--rank", 2, "--json")
    found = json.loads(out)
    assert 0 < found["error"] < 1 and all(0 < error < 1 for error in found["errors"].values())


def test_a_merged_file_is_the_stack(command, written, tmp_path):
    _, path = written("musubi", "z-image", seed=1, name="a.safetensors")
    _, other = written("ai-toolkit", "z-image", seed=2, name="b.safetensors")
    out = tmp_path / "out.safetensors"
    code, said, _ = command("merge", f"{path}:0.8", f"{other}:0.5", "-o", out)
    assert code == 0 and "exact up to rounding" in said
    code, said, _ = command("diff", "--json", out, f"{path}:0.8+{other}:0.5")
    total = json.loads(said)["total"]
    assert code == 0 and total["cosine"] == pytest.approx(1) and total["relative_difference"] < 1e-6


def test_lines_of_what_is_left_out_go_to_standard_error(command, written, tmp_path):
    _, path = written()
    save_file({**load_file(path), "diffusion_model.layers.0.attention.to_x.lora_A.weight": torch.ones(2, 24)}, path)
    code, out, err = command("convert", path, "-o", tmp_path / "out.safetensors", "--to", "kohya")
    assert code == 0 and err.startswith("left out: diffusion_model.layers.0.attention.to_x") and "left out" not in out


def test_of_many_keys_that_are_left_out_some_are_shown_and_all_are_in_the_json(command, written, tmp_path):
    _, path = written()
    stray = {f"diffusion_model.layers.0.attention.to_x{number}.lora_A.weight": torch.ones(1) for number in range(50)}
    save_file({**load_file(path), **stray}, path)
    _, _, err = command("convert", path, "-o", tmp_path / "out.safetensors", "--to", "kohya")
    assert len(err.splitlines()) == 21 and err.endswith("30 more (--json lists all)\n")
    _, out, _ = command("convert", path, "-o", tmp_path / "b.safetensors", "--to", "kohya", "--json")
    assert len(json.loads(out)["left_out"]) == 50


@pytest.mark.parametrize("damage", ["truncated", "nan", "swapped", "other model", "not there"])
@pytest.mark.parametrize("verb", ["convert", "merge"])
def test_a_bad_input_is_one_line_with_file_and_leaves_nothing(command, written, tmp_path, verb, damage):
    _, path = written(name="bad.safetensors")
    tensors = load_file(path)
    key = next(key for key in tensors if "to_q.lora_A" in key)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "not there":
        path.unlink()
    elif damage == "nan":
        tensors[key][0, 0] = torch.nan
    elif damage == "swapped":
        tensors[key] = tensors[key].T.contiguous()
    else:
        tensors = {"lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight": torch.ones(2, 2)}
    if damage in ("nan", "swapped", "other model"):
        save_file(tensors, path)
    before = folder(tmp_path)
    code, out, err = command(verb, path, "-o", tmp_path / "out.safetensors", "--to", "kohya", "--force")
    assert code == 1 and out == "" and len(err.splitlines()) == 1 and err.startswith("qpatch: error: bad.safetensors: ")
    assert (key in err) == (damage in ("nan", "swapped")) and folder(tmp_path) == before


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
@pytest.mark.parametrize("verb", ["convert", "merge"])
def test_an_input_is_never_written_over(command, written, tmp_path, verb, link):
    _, path = written()
    out = tmp_path / "other.safetensors" if link else path
    if link:
        link(path, out)
    before = folder(tmp_path)
    code, _, err = command(verb, path, "-o", out, "--to", "kohya", "--force")
    assert code == 1 and "is the input" in err and folder(tmp_path) == before


def test_an_existing_file_is_replaced_only_when_asked(command, written, tmp_path):
    _, path = written()
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"old")
    code, _, err = command("convert", path, "-o", out, "--to", "kohya")
    assert code == 1 and "--force" in err and out.read_bytes() == b"old"
    assert command("convert", path, "-o", out, "--to", "kohya", "--force")[0] == 0 and open_lora(out).layers


def test_a_full_disk_leaves_the_old_file_and_no_other(command, written, tmp_path, monkeypatch):
    from qpatch.lora.conversion import result

    def full(tensors, path, metadata):
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(result, "save_file", full)
    _, path = written()
    (tmp_path / "out.safetensors").write_bytes(b"old")
    before = folder(tmp_path)
    code, _, err = command("convert", path, "-o", tmp_path / "out.safetensors", "--to", "kohya", "--force")
    assert code == 1 and "No space left" in err and len(err.splitlines()) == 1 and folder(tmp_path) == before


@pytest.mark.parametrize("words", [
    ["convert", "a.safetensors", "--to", "kohya"], ["convert", "a.safetensors", "-o", "x.safetensors"],
    ["convert", "a.safetensors", "-o", "x.bin", "--to", "kohya"],
    ["convert", "a", "-o", "x.safetensors", "--to", "onnx"],
    ["convert", "a", "-o", "x.safetensors", "--to", "kohya", "--rank", "0"],
    ["merge", "-o", "x.safetensors"], ["transmogrify"], [],
])
def test_a_wrong_command_line_gets_one_line_and_exit_code_2(words, capsys):
    from qpatch import cli

    try:
        code = cli.main(["lora", *words])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2 and len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("verb", ["inspect", "diff", "convert", "merge"])
def test_the_help_of_each_verb_documents_the_exit_codes(verb, capsys):
    from qpatch import cli

    with pytest.raises(SystemExit) as stopped:
        cli.main(["lora", verb, "--help"])
    shown = capsys.readouterr().out
    assert stopped.value.code == 0 and "exit codes:" in shown and all(f"\n  {code}  " in shown for code in (0, 1, 2, 3))


def test_without_numpy_the_remedy_is_named_and_nothing_is_written(command, written, tmp_path, monkeypatch):
    _, path = written("musubi", "z-image")
    # safetensors imports it when it writes.
    monkeypatch.setitem(sys.modules, "numpy", None)
    before = folder(tmp_path)
    code, out, err = command("convert", path, "-o", tmp_path / "out.safetensors", "--to", "comfyui")
    assert code == 1 and err.count("\n") == 1 and "pip install numpy" in err and "qpatch failed" not in err
    assert folder(tmp_path) == before


@pytest.mark.parametrize("verb", ["diff", "convert", "merge"])
def test_with_json_an_error_is_json_too(command, written, tmp_path, verb):
    _, path = written()
    tensors = load_file(path)
    key = next(key for key in tensors if "to_q.lora_A" in key)
    save_file({**tensors, key: tensors[key].T.contiguous()}, tmp_path / "bad.safetensors")
    rest = [path] if verb == "diff" else ["-o", tmp_path / "out.safetensors", "--to", "kohya"]
    code, out, err = command(verb, "--json", tmp_path / "bad.safetensors", *rest)
    found = json.loads(out)
    assert code == found["exit_code"] == 1 and len(err.splitlines()) == 1
    assert (found["error"]["file"], found["error"]["key"]) == ("bad.safetensors", key)
