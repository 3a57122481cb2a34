"""What two LoRAs change relative to each other, against dense float64 matrices."""

import json

import numpy as np
import producers
import pytest
import torch

from qpatch.lora import LoraError, UnknownFamily, open_lora
from qpatch.lora.comparison import compare

#: (producer, kind) of two sides: factors against factors, Kronecker and Hadamard products, full differences.
PAIRS = [
    (("musubi", "lora"), ("ai-toolkit", "lora")),
    (("musubi", "lora"), ("musubi", "lokr_full")),
    (("ai-toolkit", "lokr_full"), ("musubi", "lokr_full")),
    (("simpletuner lycoris", "lokr_both"), ("musubi", "loha")),
    (("musubi", "loha"), ("ai-toolkit", "diff")),
    (("ai-toolkit", "lokr_full"), ("comfyui extract", "diff")),
]


def example(producer, kind, family, seed, large=False, **how):
    dims = {"h": 576, "f": 40} if large else None
    return producers.make(producer, family, kind, rank=3, seed=seed, dims=dims, **how)


def dense(example_of, target, strength=1.0):
    sample = example_of.layers.get(target)
    return None if sample is None or sample.change is None else sample.change(example_of.base(target), strength)


def expected(one, two):
    zero = np.zeros_like(one if one is not None else two)
    one, two = zero if one is None else one, zero if two is None else two
    norms = np.linalg.norm(one), np.linalg.norm(two)
    cosine = (one * two).sum() / (norms[0] * norms[1]) if all(norms) else None
    return norms, cosine, np.linalg.norm(one - two) / max(norms)


def check(layer, one, two):
    norms, cosine, difference = expected(one, two)
    assert (layer.first, layer.second) == pytest.approx(norms, rel=1e-6), layer.target
    assert layer.cosine == (None if cosine is None else pytest.approx(cosine, abs=1e-6))
    assert layer.relative == pytest.approx(difference, rel=1e-6)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_each_layer_is_compared_as_its_dense_matrices_are(first, second, large):
    one = example(*first, "qwen-image", 1, large=large, singles=False)
    two = example(*second, "qwen-image", 2, large=large, singles=False)
    comparison = compare([(open_lora(one.tensors), 1.0)], [(open_lora(two.tensors), 1.0)])
    assert {str(layer.target) for layer in comparison.layers} == set(one.layers) | set(two.layers)
    for layer in comparison.layers:
        check(layer, dense(one, str(layer.target)), dense(two, str(layer.target)))


def test_all_layers_together_are_one_long_vector():
    one, two = (example("ai-toolkit", "lora", "z-image", seed) for seed in (1, 2))
    total = compare([(open_lora(one.tensors), 1.0)], [(open_lora(two.tensors), 0.5)]).total
    flat = [np.concatenate([dense(side, target, strength).ravel() for target in one.layers])
            for side, strength in ((one, 1.0), (two, 0.5))]
    norms, cosine, difference = expected(*flat)
    found = total.first, total.second, total.cosine, total.relative
    assert found == pytest.approx((*norms, cosine, difference), rel=1e-6)


def test_a_stack_is_the_sum_of_its_files_at_their_strengths():
    one, two, three = (example(name, kind, "z-image", seed) for seed, (name, kind) in
                       enumerate((("musubi", "lora"), ("ai-toolkit", "lokr_full"), ("peft", "lora"))))
    files = [open_lora(side.tensors) for side in (one, two, three)]
    comparison = compare([(files[0], 0.8), (files[1], -0.5)], [(files[2], 1.0)])
    for layer in comparison.layers:
        name = str(layer.target)
        parts = [part for part in (dense(one, name, 0.8), dense(two, name, -0.5)) if part is not None]
        check(layer, sum(parts), dense(three, name))


@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_a_fused_layer_is_compared_with_the_parts_of_another_file(kind):
    fused = example("diffusion-pipe", kind, "z-image", 1, singles=False)
    split = example("ai-toolkit", "lora", "z-image", 2, singles=False)
    comparison = compare([(open_lora(fused.tensors), 1.0)], [(open_lora(split.tensors), 1.0)])
    layers = {str(layer.target): layer for layer in comparison.layers}
    assert set(layers) == set(split.layers)
    for number, part in enumerate("qkv"):
        target = f"layers.0.attention.qkv[{part}]"
        check(layers[target], np.split(dense(fused, "layers.0.attention.qkv"), 3)[number], dense(split, target))


def test_the_same_file_is_the_same_and_half_the_strength_is_half_of_it():
    file = open_lora(example("ai-toolkit", "lora", "qwen-image", 1).tensors)
    same = compare([(file, 1)], [(file, 1)])
    assert all(layer.cosine == pytest.approx(1) and layer.relative == 0 for layer in same.layers)
    half = compare([(file, 1.0)], [(file, 0.5)]).total
    assert (half.cosine, half.ratio, half.relative) == pytest.approx((1, 0.5, 0.5))


def test_what_depends_on_the_base_is_not_compared_and_says_so():
    dora, plain = example("peft", "dora_flat", "z-image", 1), example("peft", "lora", "z-image", 1)
    comparison = compare([(open_lora(dora.tensors), 1.0)], [(open_lora(plain.tensors), 1.0)])
    assert all(layer.difference is None for layer in comparison.layers)
    assert all("DoRA depends on the base weight" in layer.note for layer in comparison.layers)
    assert comparison.total.relative == 0 and comparison.total.cosine is None


def test_layers_of_different_sizes_are_not_compared():
    one = example("ai-toolkit", "lora", "z-image", 1)
    two = producers.make("ai-toolkit", "z-image", dims={"h": 48})
    notes = {layer.note for layer in compare([(open_lora(one.tensors), 1.0)], [(open_lora(two.tensors), 1.0)]).layers}
    assert any("different sizes: [24, 24] and [48, 48]" in note for note in notes)


def test_files_of_a_stack_that_disagree_about_a_size_are_refused():
    one, two = (open_lora(producers.make("ai-toolkit", "z-image", dims={"h": h}).tensors, name=f"{h}")
                for h in (24, 48))
    with pytest.raises(LoraError, match="disagree about the size"):
        compare([(one, 1.0), (two, 1.0)], [(one, 1.0)])


def test_files_for_different_models_are_refused():
    one, two = (open_lora(producers.make("ai-toolkit", family).tensors, name=family)
                for family in ("z-image", "qwen-image"))
    with pytest.raises(UnknownFamily, match="different models"):
        compare([(one, 1.0)], [(two, 1.0)])


def test_components_are_in_the_order_of_the_model():
    one = open_lora(producers.make("ai-toolkit", "z-image").tensors)
    names = list(compare([(one, 1.0)], [(one, 1.0)]).components())
    assert names[:4] == ["attention.to_q", "attention.to_k", "attention.to_v", "attention.out"]
    assert names[-1] == "t_embedder.mlp.2"


def test_the_command_shows_the_total_the_components_and_the_layers_that_differ(command, written):
    _, path = written("diffsynth", "z-image", seed=1, name="a.safetensors")
    _, other = written("ai-toolkit", "z-image", seed=2, name="b.safetensors")
    code, out, err = command("diff", f"{path}:0.5", f"{other}", "--top", 3)
    assert code == 0 and err == "" and "only in B: " in out and "adaLN_modulation.0" in out
    shown = out[out.index("differ most"):].splitlines()[1:4]
    assert all(line.startswith("  ") for line in shown)


def test_the_command_gives_every_layer_as_json(command, written):
    example_of, path = written("ai-toolkit", "z-image")
    code, out, _ = command("diff", "--json", path, f"{path}:0.25")
    found = json.loads(out)
    assert code == 0 and {layer["target"] for layer in found["layers"]} == set(example_of.layers)
    assert found["total"]["ratio"] == pytest.approx(0.25)
    assert found["total"]["relative_difference"] == pytest.approx(0.75)


@pytest.mark.parametrize(("text", "wanted"), [
    ("style.safetensors", [("style.safetensors", 1.0)]),
    ("style.safetensors:0.8", [("style.safetensors", 0.8)]),
    ("style.safetensors:-1e-1", [("style.safetensors", -0.1)]),
    (r"C:\loras\style.safetensors", [(r"C:\loras\style.safetensors", 1.0)]),
    (r"C:\loras\style.safetensors:0.5", [(r"C:\loras\style.safetensors", 0.5)]),
    ("C:0.5", [("C", 0.5)]),
    ("a.safetensors:0.8+b.safetensors", [("a.safetensors", 0.8), ("b.safetensors", 1.0)]),
])
def test_strengths_are_read_from_the_right_and_only_if_they_are_numbers(text, wanted):
    from qpatch.cli.lora_arguments import stack

    assert stack(text) == wanted


def test_a_plus_or_a_colon_in_the_name_of_a_file_belongs_to_the_name(tmp_path, monkeypatch):
    from qpatch.cli.lora_arguments import stack

    monkeypatch.chdir(tmp_path)
    for name in ("a+b.safetensors", "c:2", "d"):
        (tmp_path / name).touch()
    assert stack("a+b.safetensors:0.5+d:2+c:2") == [("a+b.safetensors", 0.5), ("d", 2.0), ("c:2", 1.0)]


def test_a_strength_that_is_no_finite_number_is_a_wrong_command_line(command, written):
    _, path = written()
    code, _, err = command("diff", f"{path}:nan", path)
    assert code == 2 and "finite" in err and len(err.splitlines()) == 1


def test_interleaved_rows_are_put_back_in_their_places():
    """Row d * 6 + j of the file is row j * dim + d of the layer."""
    plain = producers.make("ai-toolkit", "qwen-image", singles=False)
    tensors = {}
    for key, tensor in plain.tensors.items():
        if "_mod.1.lora_B" in key:
            dim = tensor.shape[0] // 6
            order = [j * dim + d for d in range(dim) for j in range(6)]
            tensors[key.replace("lora_B", "lora_B_interleaved")] = tensor[order]
        else:
            tensors[key] = tensor
    one, two = open_lora(tensors), open_lora(plain.tensors)
    for target, adapter in two.layers.items():
        (given,), (wanted,) = one.layers[target].delta().terms, adapter.delta().terms
        assert torch.equal(given.up, wanted.up) and torch.equal(given.down, wanted.down)


def test_interleaved_rows_that_are_no_six_parts_are_refused():
    base = "transformer_blocks.0.img_mod.1."
    tensors = {base + "lora_A.weight": torch.ones(1, 4), base + "lora_B_interleaved.weight": torch.ones(8, 1)}
    (adapter,) = open_lora(tensors).layers.values()
    with pytest.raises(LoraError, match="six equal parts"):
        adapter.delta()
