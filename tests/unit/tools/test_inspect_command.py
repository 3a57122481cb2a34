"""``qpatch lora inspect``: what a person and a program get to see, exit codes, errors of one line."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from qpatch.lora.inspection import measure, survey
from qpatch.lora.inspection.chart import chart
from qpatch.lora.picture.text import table


def test_a_file_is_described_in_100_columns(command, written, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    _, path = written("lightning", "qwen-image", rank=8, alpha=1.0, blocks=60, dims={"h": 8, "f": 8})
    code, out, err = command("inspect", path)
    assert code == 0 and err == ""
    assert max(map(len, out.splitlines())) <= 100
    for fact in ("lightx2v", "Qwen-Image", "8 (726 layers)", "1 (726 layers)", "alpha 1 / rank 8", "60/60", "0/60",
                 "F32"):
        assert fact in out


@pytest.mark.parametrize("columns", ["60", "80", "100", "200"])
def test_narrow_terminals_get_the_map_below_or_no_map(command, written, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    _, path = written("ai-toolkit", "qwen-image", blocks=60, dims={"h": 8, "f": 8, "m": 48})
    _, out, _ = command("inspect", path)
    assert max(map(len, out.splitlines())) <= max(60, min(100, int(columns)))
    assert out.count("0.........10") == (0 if columns == "60" else 1)


def test_the_map_tells_strong_weak_missing_and_unknown_cells_apart(written):
    _, path = written("ai-toolkit", "z-image", blocks=30, rank=1, singles=False)
    tensors = {}
    for key, tensor in load_file(path).items():
        block = key.split(".")[2]
        if "attention.to_q." in key and key.split(".")[1] == "layers" and block != "3":
            strength = (int(block) + 1) / 30 if "lora_B" in key else 1.0
            tensors[key] = torch.full_like(tensor, strength)
    save_file(tensors, path)
    drawn = chart(measure(survey(path)))
    row = next(line for line in table(drawn) if line.startswith("attention.to_q"))
    wanted = "".join("." if index == 3 else str(min(9, (index + 1) // 3)) for index in range(30))
    assert f" {wanted} .. .. " in row and row.split()[2] == "29/34"


def test_without_norms_cells_are_only_there_or_not(command, written):
    _, path = written("diffsynth", "z-image")
    code, out, _ = command("inspect", "--no-norms", path)
    line = next(line for line in out.splitlines() if line.startswith("attention.to_q"))
    assert code == 0 and "o" + "." * 29 + " o. o." in line and "change:" not in out


def test_json_says_everything_and_nothing_else_is_printed(command, written):
    example, path = written("musubi", "z-image", rank=2, alpha=1.0)
    code, out, err = command("inspect", "--json", path)
    (found,) = json.loads(out)
    assert code == 0 and err == "" and found["family"] == "z-image" and found["file"] == str(path)
    assert {layer["target"] for layer in found["layers"]} == set(example.layers)
    assert all(layer["rank"] == 2 and layer["alpha"] == 1.0 and layer["scale"] == 0.5 and layer["norm"] > 0
               for layer in found["layers"])
    coverage = {row["component"]: row for row in found["coverage"]}
    assert coverage["attention.to_q"]["layers"] == 3
    assert "layers.1.attention.to_q" in coverage["attention.to_q"]["missing"]
    assert coverage["adaLN_modulation.0"]["layers"] == 0


def test_skipped_and_unknown_keys_are_shown_with_the_reason(command, written):
    example, path = written()
    tensors = {**load_file(path), "diffusion_model.layers.0.attention.to_x.lora_A.weight": torch.ones(2, 24),
               "lora_te_x.lora_down.weight": torch.ones(2, 2)}
    save_file(tensors, path)
    code, out, _ = command("inspect", path)
    assert code == 0 and "text encoder" in out and "to_x" in out and "nearest" in out


def test_a_bad_file_is_one_line_with_file_and_key_and_the_others_are_shown(command, written, tmp_path):
    _, path = written()
    bad = tmp_path / "bad.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if "to_q.lora_A" in key)
    save_file({**tensors, key: tensors[key].T.contiguous()}, bad)
    code, out, err = command("inspect", bad, path)
    assert code == 1 and len(err.splitlines()) == 1
    assert err.startswith("qpatch: error: bad.safetensors: ") and key in err and "transposed" in err
    assert "style.safetensors" in out


def test_a_layer_that_composing_would_refuse_makes_the_exit_code_1(command, written):
    _, path = written()
    tensors = load_file(path)
    tensors[next(key for key in tensors if "lora_A" in key)][0, 0] = torch.inf
    save_file(tensors, path)
    code, out, _ = command("inspect", path)
    assert code == 1 and "refused" in out and "NaN or Inf" in out


def test_the_family_can_be_demanded(command, written):
    _, path = written("ai-toolkit", "z-image")
    assert command("inspect", "--model", "z-image", "--no-norms", path)[0] == 0
    code, _, err = command("inspect", "--model", "qwen-image", path)
    assert code == 1 and "made for another model" in err


def test_debug_shows_the_traceback_of_a_refusal(command, tmp_path):
    code, _, err = command("inspect", "--debug", tmp_path / "gone.safetensors")
    assert code == 1 and "Traceback" in err and err.splitlines()[-1].startswith("qpatch: error: gone.safetensors")


def test_a_picture_of_several_files_is_refused(command, written):
    _, path = written()
    code, _, err = command("inspect", path, path, "--plot", "x.png")
    assert code == 2 and "one file" in err


def test_a_plot_without_matplotlib_is_one_line_that_names_the_remedy(command, written, tmp_path, monkeypatch):
    _, path = written("musubi", "z-image", blocks=1)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = command("inspect", path, "--plot", tmp_path / "map.png")
    assert code == 1 and err.count("\n") == 1 and "pip install matplotlib" in err and "qpatch failed" not in err


def test_refused_files_are_in_the_json_with_what_is_wrong(command, written, tmp_path):
    _, path = written()
    (tmp_path / "bad.safetensors").write_text("bad")
    code, out, err = command("inspect", "--json", tmp_path / "bad.safetensors", path)
    good, bad = json.loads(out)
    assert code == 1 and len(err.splitlines()) == 1 and good["layers"]
    assert bad["file"].endswith("bad.safetensors") and "not a safetensors file" in bad["error"]["message"]


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(command, written, tmp_path, monkeypatch):
    from qpatch.lora import inspection

    _, path = written()
    monkeypatch.setattr(inspection, "measure", None)
    (tmp_path / "there.html").write_text("old")
    for name, reason in (("x.pdf", "picture's name ends in"), ("there.html", "--force"), ("gone/x.html", "no folder")):
        code, _, err = command("inspect", path, "--plot", tmp_path / name)
        assert code == 1 and reason in err and len(err.splitlines()) == 1


def test_escape_sequences_of_a_file_do_not_reach_the_terminal(command, written):
    _, path = written()
    tensors = {**load_file(path), "diffusion_model.\x1b[2J\nlayers.lora_A.weight": torch.ones(2, 24)}
    save_file(tensors, path, {"modelspec.trigger_phrase": "\x1b]0;owned\x07ohwx"})
    code, out, _ = command("inspect", path)
    assert code == 0 and not {"\x1b", "\x07"} & set(out) and "\\x1b]0;owned\\x07ohwx" in out
