"""Every format in, every format out, and back: the changes of all layers are the same in float64."""

import json
import re

import numpy as np
import producers
import pytest
import torch
from dense_changes import changes, largest_error
from safetensors.torch import save_file

from qpatch.lora import LoraError, open_lora
from qpatch.lora.conversion import FORMATS, convert
from qpatch.lora.conversion.entries import entry_of
from qpatch.lora.conversion.reshape import split
from qpatch.lora.source import DictSource

#: Why a kind of adapter cannot be held by a format (words of the message).
BASE, BIAS, RANK = "depends on the base weight", "no place for the change of a bias", "--rank N"
NEED_BASE = ("dora_lokr", "peft_oft", "peft_oft_shared", "oft", "boft", "glora", "glora_old", "ia3_rows", "ia3_columns",
             "peft_ia3", "peft_ia3_ffn", "set_weight")
REFUSED = {
    **{("diffusers", kind): BASE for kind in NEED_BASE},
    **{("nunchaku", kind): BASE for kind in (*NEED_BASE, "dora", "dora_flat", "dora_columns")},
    ("diffusers", "dora_columns"): "scales columns", ("diffusers", "diff_b"): BIAS,
    ("diffusers", "diff"): RANK, ("nunchaku", "diff"): RANK,
}
CASES = [(name, family, kind) for name, rules in producers.PRODUCERS.items()
         for family in rules.families for kind in rules.kinds]
NAMES = r"((transformer_blocks|layers|noise_refiner|context_refiner)\.\d+\.|[a-z_]+\.)"
SPELLED = {
    "comfyui": r"diffusion_model\." + NAMES,
    "diffusers": r"(transformer\.)?" + NAMES,
    "kohya": r"lora_unet_[A-Za-z0-9_]+\.",
    "nunchaku": r"diffusion_model\.",
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("producer", "family", "kind"), CASES)
def test_every_format_in_and_every_format_out_changes_the_same(producer, family, kind, name):
    example = producers.make(producer, family, kind, rank=3)
    file = open_lora(example.tensors)
    if (name, kind) in REFUSED:
        with pytest.raises(LoraError, match=REFUSED[name, kind]):
            convert(file, FORMATS[name])
        return
    result = convert(file, FORMATS[name])
    assert all(re.match(SPELLED[name], key) for key in result.tensors)
    # DoRA beside an alpha has to have it multiplied in for diffusers; all else is exact.
    tolerance = 1e-6 if name == "diffusers" and kind.startswith("dora") else 1e-12
    assert largest_error(changes(file, example), changes(open_lora(result.tensors), example)) < tolerance
    assert result.error < tolerance


@pytest.mark.parametrize("via", FORMATS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["qwen-image", "z-image"])
def test_there_and_back_is_bitwise_the_same_file(family, name, via):
    example = producers.make("musubi", family, rank=3, alpha=2.0, dtype=torch.bfloat16)
    source = convert(open_lora(example.tensors), FORMATS[name])
    there = convert(open_lora(source.tensors), FORMATS[via])
    back = convert(open_lora(there.tensors), FORMATS[name])
    if (family, name, via) == ("z-image", "kohya", "nunchaku"):
        # ComfyUI reads only fused attention in this spelling: what is fused stays so. The changes are the same.
        assert largest_error(changes(open_lora(source.tensors)), changes(open_lora(back.tensors))) == 0
        return
    assert set(back.tensors) == set(source.tensors)
    for key, tensor in source.tensors.items():
        assert torch.equal(back.tensors[key], tensor) and back.tensors[key].dtype == tensor.dtype


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_factors_keep_their_values_in_every_dtype(dtype):
    file = open_lora(producers.make("ai-toolkit", "z-image", dtype=dtype).tensors)
    result = convert(file, FORMATS["nunchaku"])
    assert largest_error(changes(file), changes(open_lora(result.tensors))) < 1e-12 and not result.errors


def test_the_nunchaku_form_has_its_terms_in_place():
    """Rows of fused layers in the order of the modules, rows of modulations interleaved: written out a second time."""
    qwen, z = (producers.make("ai-toolkit", family, rank=2, singles=False) for family in ("qwen-image", "z-image"))
    tensors = convert(open_lora(qwen.tensors), FORMATS["nunchaku"]).tensors
    up = qwen.layers["transformer_blocks.0.img_mod.1"].tensors["up"]
    dim = up.shape[0] // 6
    written = tensors["diffusion_model.transformer_blocks.0.img_mod.1.lora_B_interleaved.weight"]
    assert all(torch.equal(written[d * 6 + j], up[j * dim + d]) for d in range(dim) for j in range(6))
    tensors = convert(open_lora(z.tensors), FORMATS["nunchaku"]).tensors
    fused = tensors["diffusion_model.layers.0.feed_forward.w13.lora_B.weight"]
    w3, w1 = (z.layers[f"layers.0.feed_forward.w13[{part}]"].tensors["up"] for part in ("w3", "w1"))
    assert torch.equal(fused, torch.block_diag(w3, w1))
    down = tensors["diffusion_model.layers.0.attention.qkv.lora_A.weight"]
    assert torch.equal(down, torch.cat([z.layers[f"layers.0.attention.qkv[{part}]"].tensors["down"] for part in "qkv"]))


def test_parts_that_share_their_down_factor_are_fused_without_more_rank():
    example = producers.make("diffusion-pipe", "z-image", rank=4, singles=False)
    split = convert(open_lora(example.tensors), FORMATS["diffusers"])
    fused = convert(open_lora(split.tensors), FORMATS["nunchaku"])
    assert fused.tensors["diffusion_model.layers.0.attention.qkv.lora_A.weight"].shape[0] == 4


@pytest.mark.parametrize("parts", [("q",), ("q", "v"), ("k",)])
def test_missing_parts_stay_missing(parts):
    tensors = {key: tensor for key, tensor in producers.make("ai-toolkit", "z-image", singles=False).tensors.items()
               if any(f"layers.0.attention.to_{part}." in key for part in parts)}
    file = open_lora(tensors)
    fused = convert(file, FORMATS["nunchaku"])
    back = convert(open_lora(fused.tensors), FORMATS["comfyui"])
    assert fused.layers == 1 and {key: tensor.tolist() for key, tensor in back.tensors.items()} == {
        key: tensor.tolist() for key, tensor in tensors.items()}


def test_parts_with_unequal_scales_are_fused_exactly_where_the_dtype_can_hold_it():
    for alphas, dtype, exact in (((1.0, 2.0, 8.0), torch.bfloat16, True), ((1.0, 3.0, 5.0), torch.bfloat16, False)):
        example = producers.make("musubi", "z-image", rank=4, alpha=1.0, dtype=dtype, singles=False)
        for part, alpha in zip("qkv", alphas):
            example.tensors[f"lora_unet_layers_0_attention_to_{part}.alpha"] = torch.tensor(alpha)
        file = open_lora(example.tensors)
        result = convert(file, FORMATS["nunchaku"])
        up = result.tensors["diffusion_model.layers.0.attention.qkv.lora_B.weight"]
        assert up.dtype == (dtype if exact else torch.float32)
        assert largest_error(changes(file), changes(open_lora(result.tensors))) < (1e-12 if exact else 1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_alpha_is_kept_and_never_multiplied_in(name):
    example = producers.make("lightning", "qwen-image", rank=4, alpha=0.7, dtype=torch.bfloat16)
    result = convert(open_lora(example.tensors), FORMATS[name])
    alphas = {key: tensor for key, tensor in result.tensors.items() if key.endswith(".alpha")}
    assert len(alphas) == result.layers
    for key, alpha in alphas.items():
        rank = next(tensor.shape[0] for other, tensor in result.tensors.items()
                    if other.startswith(key.removesuffix("alpha")) and ("lora_A" in other or "lora_down" in other))
        assert alpha.item() / rank == pytest.approx(np.float32(0.7) / 4, rel=1e-15)


def test_names_for_diffusers_have_its_prefix_unless_there_are_alphas():
    """It puts the prefix in front of the names of a file with alphas itself."""
    for producer, prefix in (("ai-toolkit", "transformer.layers."), ("musubi", "layers.")):
        file = open_lora(producers.make(producer, "z-image", rank=4, alpha=1.0).tensors)
        keys = convert(file, FORMATS["diffusers"]).tensors
        assert sum(key.startswith(prefix) for key in keys) > 10
        assert any(key.endswith(".alpha") for key in keys) == (producer == "musubi")


def test_alpha_is_written_without_need_only_in_the_kohya_format():
    file = open_lora(producers.make("ai-toolkit", "z-image", rank=4).tensors)
    counts = {name: sum(key.endswith(".alpha") for key in convert(file, format).tensors)
              for name, format in FORMATS.items()}
    assert counts == {"comfyui": 0, "diffusers": 0, "kohya": len(file.layers), "nunchaku": 0}


def test_alpha_from_the_metadata_is_written_down_when_asked_for():
    example = producers.make("simpletuner", "z-image", rank=4, alpha=2.0)
    for asked, scale in ((False, 1.0), (True, 0.5)):
        file = open_lora(DictSource(example.tensors, metadata=example.metadata), metadata_alpha=asked)
        result = convert(file, FORMATS["kohya"])
        assert {adapter.scale for adapter in open_lora(result.tensors).layers.values()} == {scale}
        assert "lora_adapter_metadata" not in result.metadata


def test_text_encoder_keys_are_copied_as_they_are():
    tensors = {**producers.make("musubi", "qwen-image").tensors, "lora_te_layers_0.lora_down.weight": torch.ones(2, 3)}
    result = convert(open_lora(tensors), FORMATS["diffusers"])
    assert torch.equal(result.tensors["lora_te_layers_0.lora_down.weight"], torch.ones(2, 3))
    assert result.text_encoder_keys == 1


def test_what_the_format_cannot_hold_is_dropped_only_when_asked_and_listed():
    tensors = producers.make("ai-toolkit", "z-image", "lora").tensors
    tensors["diffusion_model.layers.0.attention_norm1.diff"] = torch.ones(24)
    file = open_lora(tensors)
    with pytest.raises(LoraError, match="norm") as refused:
        convert(file, FORMATS["diffusers"])
    assert refused.value.key == "diffusion_model.layers.0.attention_norm1.diff"
    result = convert(file, FORMATS["diffusers"], drop=True)
    assert [key for key, _ in result.left_out] == ["diffusion_model.layers.0.attention_norm1.diff"]
    assert result.layers == len(file.layers) - 1


def test_keys_that_composing_leaves_out_are_listed():
    tensors = {**producers.make("ai-toolkit", "z-image").tensors,
               "diffusion_model.layers.0.attention.to_x.lora_A.weight": torch.ones(2, 24)}
    assert "to_x" in convert(open_lora(tensors), FORMATS["kohya"]).left_out[0][0]


def test_metadata_is_kept_what_is_stale_goes_and_the_history_grows(tmp_path):
    example = producers.make("musubi", "z-image", rank=4)
    metadata = {"ss_output_name": "style", "ss_network_dim": "4", "ss_network_alpha": "2.0", "sshs_model_hash": "abc"}
    save_file(example.tensors, tmp_path / "a.safetensors", metadata)
    first = convert(open_lora(tmp_path / "a.safetensors"), FORMATS["comfyui"], made_by="qpatch 9")
    assert first.metadata["ss_output_name"] == "style" and first.metadata["ss_network_dim"] == "4"
    assert "sshs_model_hash" not in first.metadata and first.metadata["qpatch.format"] == "comfyui"
    save_file(first.tensors, tmp_path / "b.safetensors", first.metadata)
    second = convert(open_lora(tmp_path / "b.safetensors"), FORMATS["kohya"], max_rank=2, made_by="qpatch 9")
    history = json.loads(second.metadata["qpatch.history"])
    assert [(step["to"], step["sources"][0]["name"], step["by"]) for step in history] == [
        ("comfyui", "a.safetensors", "qpatch 9"), ("kohya", "b.safetensors", "qpatch 9")]
    assert second.metadata["ss_network_dim"] == "2" and history[1]["error"] == second.error > 0


def test_a_lokr_of_a_fused_layer_is_cut_where_its_outer_factor_allows_it():
    for rows, possible in ((6, True), (4, False)):
        w1, w2 = torch.randn(rows, 4), torch.randn(72 // rows, 6)
        name = "diffusion_model.layers.0.attention.qkv"
        file = open_lora({f"{name}.lokr_w1": w1, f"{name}.lokr_w2": w2})
        full = torch.kron(w1.double(), w2.double()).numpy()
        (adapter,) = file.layers.values()
        if not possible:
            with pytest.raises(LoraError, match="cannot be cut"):
                split(entry_of(adapter, FORMATS["comfyui"]), file.family)
            continue
        pieces = split(entry_of(adapter, FORMATS["comfyui"]), file.family)
        for piece, wanted in zip(pieces, np.split(full, 3)):
            kron = torch.kron(*(tensor.double() for tensor in piece.tensors.values())).numpy()
            assert np.allclose(kron, wanted, atol=1e-12)


def test_reading_a_file_and_converting_it_leaves_it_as_it_is(tmp_path):
    example = producers.make("musubi", "z-image", dtype=torch.bfloat16)
    path = example.write(tmp_path / "a.safetensors")
    before = path.read_bytes()
    for format in FORMATS.values():
        convert(open_lora(path), format, max_rank=2, dtype=torch.float16)
    assert path.read_bytes() == before
