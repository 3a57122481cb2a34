"""Numbers, ranks and names beyond what any real file has: one line, nothing left behind, and JSON that is JSON."""

import json

import pytest
import torch
from safetensors.torch import save_file

from qpatch.lora import LoraError, ShapeError, lowrank, open_lora
from qpatch.lora.adapters.base import HIGHEST_RANK
from qpatch.lora.inspection import measure, survey
from qpatch.lora.products import inner, part_of_terms
from qpatch.lora.terms import Term

Q = "diffusion_model.layers.0.attention.to_q"


def pair(out=24, inp=24, rank=2, stem=Q, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {f"{stem}.lora_A.weight": torch.randn(rank, inp, generator=generator),
            f"{stem}.lora_B.weight": torch.randn(out, rank, generator=generator)}


def strict(text):
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


@pytest.fixture
def saved(tmp_path):
    def save(tensors, name="a.safetensors"):
        save_file(tensors, tmp_path / name)
        return tmp_path / name

    return save


@pytest.mark.parametrize(("strengths", "to"), [((1e308, 1e308), "comfyui"), ((1e39, 1.0), "comfyui"),
                                               ((1e300, 1.0), "diffusers"), ((1e39, 1.0), "nunchaku")])
def test_a_stack_too_large_to_be_written_is_refused_and_leaves_nothing(command, saved, tmp_path, strengths, to):
    paths = [saved(pair(seed=seed), f"{seed}.safetensors") for seed in (0, 1)]
    words = [f"{path}:{strength}" for path, strength in zip(paths, strengths)]
    code, out, err = command("merge", *words, "-o", tmp_path / "y.safetensors", "--to", to)
    assert code == 1 and out == "" and len(err.splitlines()) == 1
    assert "too large" in err and "layers.0.attention" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.safetensors", "1.safetensors"]


def test_a_scale_that_cannot_be_multiplied_into_the_factors_names_the_layer(command, saved, tmp_path):
    split = {**pair(), **pair(stem=Q.replace("to_q", "to_k"))}
    split[f"{Q}.alpha"] = torch.tensor(1e300, dtype=torch.float64)
    code, _, err = command("convert", saved(split), "-o", tmp_path / "y.safetensors", "--to", "nunchaku")
    assert code == 1 and "too large" in err and "qkv[q]" in err and not (tmp_path / "y.safetensors").exists()


@pytest.mark.parametrize("strengths", [("1e200", "1e-200"), ("1e308", "1e308")])
def test_a_comparison_beyond_float64_is_null_with_the_reason(command, saved, strengths):
    path = saved(pair())
    code, out, _ = command("diff", "--json", *(f"{path}:{strength}" for strength in strengths))
    (layer,) = strict(out)["layers"]
    assert code == 0 and layer["norm_a"] is None and "too large" in layer["note"]


def test_infinities_of_a_file_are_null_or_a_problem_in_the_json(command, saved):
    kronecker = {f"{Q}.lokr_w1": torch.ones(4, 4), f"{Q}.lokr_w2": torch.ones(6, 6)}
    code, out, _ = command("inspect", "--json", saved({**kronecker, f"{Q}.alpha": torch.tensor(torch.inf)}))
    assert code == 0 and strict(out)[0]["layers"][0]["alpha"] is None
    code, out, _ = command("inspect", "--json", saved({key: tensor * 1e30 for key, tensor in kronecker.items()}))
    assert strict(out)[0]["layers"]
    huge = {**pair(), f"{Q}.alpha": torch.tensor(1e308, dtype=torch.float64)}
    code, out, _ = command("inspect", "--json", saved(huge))
    assert strict(out)


@pytest.mark.parametrize("verb", ["inspect", "diff", "convert"])
def test_a_rank_that_no_file_has_is_refused_with_file_and_key(command, saved, tmp_path, verb):
    path = saved(pair(8, 8, HIGHEST_RANK + 1))
    rest = {"inspect": [], "diff": [path], "convert": ["-o", tmp_path / "y.safetensors", "--to", "kohya", "--rank", 4]}
    code, _, err = command(verb, path, *rest[verb])
    assert code == 1 and err.startswith(f"qpatch: error: a.safetensors: {Q}") and "no rank is so high" in err


def test_blocks_of_a_rotation_that_no_layer_has_are_refused():
    huge = torch.zeros(1).half().expand(1, 65536, 65536)
    with pytest.raises(ShapeError, match="no layer is so large"):
        open_lora({f"{Q}.oft_blocks": huge})


def test_norms_and_products_of_a_rank_above_the_size_are_those_of_the_rows(saved):
    tensors = pair(24, 18, 300)
    down, up = tensors.values()
    wanted = (up.double() @ down.double()).norm().item()
    term = Term(up, down)
    part = part_of_terms([term])
    assert lowrank.norm(term) == pytest.approx(wanted, rel=1e-5)
    assert inner([part], [part]) == pytest.approx(wanted**2)
    assert measure(survey(saved(tensors))).layers[0].norm == pytest.approx(wanted, rel=1e-5)
    fused = saved({key.replace("to_q", "qkv"): tensor for key, tensor in tensors.items()})
    assert measure(survey(fused)).layers[0].norm == pytest.approx(wanted, rel=1e-5)


def test_a_block_of_five_thousand_digits_is_an_unknown_key(command, saved):
    far = pair(stem=f"diffusion_model.layers.{'9' * 5000}.attention.to_q")
    assert len(open_lora({**pair(), **far}).unknown) == 2
    with pytest.raises(LoraError):
        open_lora(far)
    for options in ([], ["--no-norms"]):
        code, _, err = command("inspect", *options, saved(far))
        assert code == 1 and len(err.splitlines()) == 1 and "qpatch failed" not in err
