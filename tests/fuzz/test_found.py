"""What the fuzzer found, once for each: files that ended in another error than a refusal, or took too much."""

import json
import math

import pytest
import torch
import trees
from safetensors.torch import save_file

from qpatch import lora
from qpatch.lora import nearest, rules
from qpatch.lora.inspection import measure, survey

Q = "transformer_blocks.0.attn.to_q"
OUT = "transformer_blocks.0.attn.to_out.0"


@pytest.fixture
def model():
    torch.manual_seed(0)
    return trees.qwen(h=128, f=128)


def pair(stem=Q, out=128, inp=128, rank=2, value=1.0):
    return {f"{stem}.lora_A.weight": torch.full((rank, inp), value),
            f"{stem}.lora_B.weight": torch.full((out, rank), value)}


def written(tmp_path, tensors, metadata=None):
    save_file(tensors, tmp_path / "x.safetensors", metadata)
    return tmp_path / "x.safetensors"


def test_a_change_that_is_too_large_for_the_module_names_file_and_key(model, tmp_path):
    path = written(tmp_path, pair(OUT))
    for strength in (1e38, 1e300):
        with pytest.raises(lora.NonFiniteError, match=f"at this strength.*in {OUT}") as caught:
            lora.compose(model, [(path, strength * 1e3)])
        assert caught.value.file == "x.safetensors" and caught.value.key.startswith(OUT)
    lora.compose(model, [(path, 1.0)])
    with pytest.raises(lora.NonFiniteError) as caught:
        lora.set_strengths(model, [1e300])
    assert "x.safetensors" in caught.value.file


@pytest.mark.parametrize("name", ["a\\ud83d", "\\udc00.lora_A.weight"])
def test_half_a_surrogate_pair_in_a_key_is_refused_as_safetensors_refuses_it(tmp_path, name):
    text = f'{{"{name}": {{"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}}}'.encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    with pytest.raises(lora.FileError, match="not the JSON") as caught:
        lora.open_lora(tmp_path / "x.safetensors")
    str(caught.value).encode("utf-8")


def test_a_dense_change_beyond_float32_is_refused_with_its_key(model, tmp_path):
    """DoRA on a quantized layer: the SVD of its change got infinities."""
    tensors = {**pair(OUT, value=1e30), f"{OUT}.dora_scale": torch.ones(128, 1)}
    with pytest.raises(lora.NonFiniteError, match="too large for float32") as caught:
        lora.compose(model, [(written(tmp_path, tensors), 1.0)])
    assert caught.value.file == "x.safetensors" and caught.value.key.startswith(OUT)


@pytest.mark.parametrize("value", ["[" * 20_000, '{"a":' * 20_000, '{"r": ' + "9" * 400 + "}"])
@pytest.mark.parametrize("key", ["lora_adapter_metadata", "ss_tag_frequency", "training_info"])
def test_json_in_the_metadata_that_python_cannot_take_says_nothing(tmp_path, key, value):
    path = written(tmp_path, pair(), {key: value})
    assert measure(survey(path)).measured
    assert lora.open_lora(path, metadata_alpha=True).layers


def test_a_full_difference_in_fp8_has_a_norm(tmp_path):
    path = written(tmp_path, {f"{Q}.diff": torch.ones(128, 128).to(torch.float8_e4m3fn)})
    assert measure(survey(path)).layers[0].norm == pytest.approx(128)


@pytest.mark.parametrize("roles", [
    {"lokr_w1_a": "n1", "lokr_w1_b": "1n", "lokr_w2_a": "n1", "lokr_w2_b": "1n"},
    {"hada_w1_a": "n1", "hada_w1_b": "1n", "hada_w2_a": "n1", "hada_w2_b": "1n"},
])
def test_small_factors_of_a_matrix_that_fits_no_memory_are_refused(tmp_path, roles):
    shapes = {"n1": (60_000, 1), "1n": (1, 60_000)}
    tensors = {f"{Q}.{role}": torch.zeros(shapes[shape]).bfloat16() for role, shape in roles.items()}
    with pytest.raises(lora.ShapeError, match="no layer is so large") as caught:
        lora.open_lora(written(tmp_path, tensors))
    assert caught.value.key.startswith(Q)


def test_the_norm_of_a_thin_hadamard_product_is_that_of_its_rows(tmp_path):
    """Rows of a large product took time with its size; the factors are enough."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{Q}.hada_w{which}_{side}": torch.randn(shape, generator=generator)
               for which in (1, 2) for side, shape in (("a", (300, 1)), ("b", (1, 200)))}
    a1, b1, a2, b2 = (tensors[f"{Q}.hada_w{which}_{side}"].double() for which in (1, 2) for side in "ab")
    wanted = ((a1 @ b1) * (a2 @ b2)).norm().item()
    assert measure(survey(written(tmp_path, tensors))).layers[0].norm == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("tensors, said", [
    ({"oft_blocks": torch.zeros(8, 2, 2)}, "a vector"), ({"ia3_l": torch.ones(16, 1)}, "a vector"),
    ({"oft_R.weight": torch.zeros(8, 1)}, "a vector"),
])
def test_what_changes_a_matrix_is_refused_for_a_norm(model, tmp_path, tensors, said):
    stem = "transformer_blocks.0.attn.norm_q"
    with pytest.raises(lora.ShapeError, match=said) as caught:
        lora.compose(model, [(written(tmp_path, {f"{stem}.{end}": tensor for end, tensor in tensors.items()}), 1.0)])
    assert caught.value.key.startswith(stem)


@pytest.mark.parametrize("tensors, said", [
    ({"oft_blocks": torch.zeros(8, 3, 3)}, "rotate 24 rows"),
    ({"oft_R.weight": torch.zeros(5, 3)}, "rotate 15 columns"),
    ({"ia3_l": torch.ones(60, 1)}, "60 factors"),
    ({"weight": torch.ones(7), "on_input": torch.tensor(True)}, "7 factors"),
])
def test_a_rotation_or_scaling_of_another_size_is_refused_by_its_size(model, tmp_path, tensors, said):
    with pytest.raises(lora.ShapeError, match=said) as caught:
        lora.compose(model, [(written(tmp_path, {f"{OUT}.{end}": tensor for end, tensor in tensors.items()}), 1.0)])
    assert caught.value.file == "x.safetensors" and caught.value.key.startswith(OUT)


def test_a_name_of_a_hundred_thousand_letters_is_compared_with_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(nearest.difflib, "get_close_matches", None)
    file = lora.open_lora({**pair(), f"{'transformer_blocks.' * 5000}x.lora_A.weight": torch.ones(1, 1)})
    assert len(file.unknown) == 1


def test_a_prefix_a_hundred_thousand_times_is_taken_off_at_once():
    """One after the other took time with the square of their number: this test would not end."""
    tensors = {f"{'model.' * 300_000}{key}": tensor for key, tensor in pair().items()}
    assert [str(target) for target in lora.open_lora(tensors).layers] == ["transformer_blocks.0.attn.to_qkv[q]"]


@pytest.mark.parametrize("pattern", ["((((.*)*)*)*)*x", "(.*_?)*(.*.?)*!", "(a|a)*" * 20, "(" * 5000 + ")" * 5000,
                                     "(.{1,9}){1,9}{9}"])
def test_a_regex_that_would_take_for_ever_fits_nothing(tmp_path, pattern):
    config = {"lora_alpha": 4, "r": 2, "alpha_pattern": {pattern: 100}}
    path = written(tmp_path, pair(), {"lora_adapter_metadata": json.dumps(config)})
    (adapter,) = lora.open_lora(path, metadata_alpha=True).layers.values()
    assert adapter.scale == 2.0


def test_the_patterns_that_peft_writes_still_fit():
    patterns = {"^transformer_blocks\\.\\d+\\.attn\\.to_[qkv]$": 5.0, "to_out.0": 7.0, ".*mlp.*": 9.0}
    config = rules.AdapterConfig(alpha=1.0, alpha_pattern=patterns)
    stems = (Q, OUT, "transformer_blocks.3.img_mlp.net.2", "img_in")
    assert [config.alpha_of(stem) for stem in stems] == [5.0, 7.0, 9.0, 1.0]
    assert math.isfinite(config.alpha_of("x" * 100_000))
