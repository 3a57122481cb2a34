"""Opening files: what becomes a layer, with which scale, and what is left out and why."""

import gc
import json
import re

import numpy as np
import producers
import pytest
import torch
from safetensors.torch import save_file

from qpatch.lora import families
from qpatch.lora.errors import FileError, LoraError, UnknownFamily, UnsupportedAdapter
from qpatch.lora.files import open_lora
from qpatch.lora.keys import Target

Q = "transformer_blocks.0.attn.to_q"


def pair(stem=Q, out=6, inp=5, rank=2, down="lora_A.weight", up="lora_B.weight"):
    return {f"{stem}.{down}": torch.randn(rank, inp), f"{stem}.{up}": torch.randn(out, rank)}


def only(tensors, **options):
    (adapter,) = open_lora(tensors, **options).layers.values()
    return adapter


def product(adapter):
    (term,) = adapter.delta().terms
    return term.scale * term.up.double() @ term.down.double()


def test_plain_lora_from_a_file_gives_its_product_times_alpha_over_rank(tmp_path):
    tensors = {**pair(), f"{Q}.alpha": torch.tensor(1.0)}
    save_file(tensors, tmp_path / "a.safetensors")
    file = open_lora(tmp_path / "a.safetensors")
    adapter = file.layers[Target("transformer_blocks.0.attn.to_qkv", "q")]
    down, up, _ = (tensor.double() for tensor in tensors.values())
    assert torch.allclose(product(adapter), 0.5 * up @ down, rtol=1e-12)
    assert (adapter.shape, adapter.rank, adapter.alpha, adapter.scale_note) == ((6, 5), 2, 1.0, "alpha 1 / rank 2")
    assert (file.name, adapter.file, file.family.name, adapter.kind) == (*2 * ("a.safetensors",), "qwen-image", "lora")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
                                   torch.float8_e5m2])
def test_a_file_and_a_dict_give_the_same_terms_in_every_dtype(tmp_path, dtype):
    example = producers.make("lightning", "qwen-image", dtype=dtype, alpha=8.0, rank=5)
    path = example.write(tmp_path / "a.safetensors")
    from_file, from_dict = open_lora(path), open_lora(example.tensors, name="a.safetensors")
    assert from_file.layers.keys() == from_dict.layers.keys()
    for target, adapter in from_file.layers.items():
        expected = example.layers[str(target)].change(None, 1.0)
        assert torch.equal(product(adapter), product(from_dict.layers[target]))
        assert np.allclose(product(adapter), expected, rtol=1e-9, atol=1e-12)


def test_opening_reads_no_tensor(tmp_path, monkeypatch):
    path = producers.make("musubi", "z-image", dtype=torch.bfloat16).write(tmp_path / "a.safetensors")
    monkeypatch.setattr("qpatch.lora.source.FileSource.tensor", None)
    assert open_lora(path).layers


def test_the_terms_of_a_dict_are_views_of_its_tensors():
    tensors = producers.make("musubi", "z-image", dtype=torch.bfloat16).tensors
    addresses = {tensor.data_ptr() for tensor in tensors.values()}
    for adapter in open_lora(tensors).layers.values():
        (term,) = adapter.delta().terms
        assert {term.up.data_ptr(), term.down.data_ptr()} <= addresses


def test_alpha_may_be_present_for_one_layer_only_and_of_any_number_type():
    other = Q.replace("to_q", "to_k")
    four = torch.tensor(4.0)
    for alpha in (four.int(), four.long(), four[None], four.half(), four.double(), four.to(torch.float8_e4m3fn)):
        file = open_lora({**pair(), f"{Q}.alpha": alpha, **pair(other)})
        scales = {str(target)[-2]: adapter.scale for target, adapter in file.layers.items()}
        assert scales == {"q": 2.0, "k": 1.0}


def test_alpha_in_a_tensor_and_folded_into_the_factor_say_the_same():
    tensors = pair(rank=16)
    folded = {**tensors, f"{Q}.lora_B.weight": tensors[f"{Q}.lora_B.weight"] / 16}
    with_alpha = only({**tensors, f"{Q}.alpha": torch.tensor(1.0)})
    assert torch.allclose(product(with_alpha), product(only(folded)), rtol=1e-6)
    sixteen = only({**tensors, f"{Q}.alpha": torch.tensor(16.0)})
    assert torch.allclose(16 * product(with_alpha), product(sixteen), rtol=1e-6)


def test_ranks_and_alphas_may_differ_between_the_parts_of_a_fused_layer():
    tensors = {}
    for part, rank in (("q", 4), ("k", 8), ("v", 2)):
        stem = f"layers.0.attention.to_{part}"
        tensors |= {**pair(stem, rank=rank), f"{stem}.alpha": torch.tensor(float(rank) / 2)}
    layers = open_lora(tensors).layers
    assert {target.part: (adapter.rank, adapter.scale) for target, adapter in layers.items()} == {
        "q": (4, 0.5), "k": (8, 0.5), "v": (2, 0.5)}


def test_a_scale_tensor_replaces_alpha_over_rank():
    assert only({**pair(), f"{Q}.alpha": torch.tensor(7.0), f"{Q}.scale": torch.tensor(0.25)}).scale == 0.25


def test_the_rslora_flag_divides_alpha_by_the_root_of_the_rank():
    tensors = {**pair(rank=16), f"{Q}.alpha": torch.tensor(8.0)}
    assert only({**tensors, "use_rslora_flag": torch.tensor(True)}).scale == 2.0
    assert only({**tensors, "use_rslora_flag": torch.tensor(False)}).scale == 0.5


def metadata_file(tmp_path, **config):
    config = {f"transformer.{key}": value for key, value in config.items()}
    save_file({**pair(rank=4), **pair(Q.replace("to_q", "to_k"), rank=4)}, tmp_path / "m.safetensors",
              {"lora_adapter_metadata": json.dumps(config)})
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize("config, expected", [
    ({"r": 4, "lora_alpha": 2}, {"q": 0.5, "k": 0.5}),
    ({"r": 4, "lora_alpha": 2, "use_rslora": True}, {"q": 1.0, "k": 1.0}),
    ({"r": 8, "lora_alpha": 2, "alpha_pattern": {"attn.to_k": 8}}, {"q": 0.5, "k": 2.0}),
    ({"r": 8, "lora_alpha": 2, "alpha_pattern": {r"transformer_blocks\.\d+\.attn\.to_[kv]": 6}}, {"q": 0.5, "k": 1.5}),
    ({"r": 4}, {"q": 1.0, "k": 1.0}),
    ({"lora_alpha": "two"}, {"q": 1.0, "k": 1.0}),
])
def test_alpha_of_the_metadata_counts_only_when_asked_for(tmp_path, config, expected):
    path = metadata_file(tmp_path, **config)
    asked = open_lora(path, metadata_alpha=True).layers
    assert {target.part: adapter.scale for target, adapter in asked.items()} == expected
    assert all(adapter.scale == 1.0 for adapter in open_lora(path).layers.values())


def test_an_alpha_tensor_wins_over_the_metadata(tmp_path):
    save_file({**pair(rank=4), f"{Q}.alpha": torch.tensor(8.0)}, tmp_path / "m.safetensors",
              {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 2})})
    assert only(tmp_path / "m.safetensors", metadata_alpha=True).scale == 2.0


@pytest.mark.parametrize("text", ["", "no json", "[1]", "null", '{"transformer.alpha_pattern": 5}',
                                  '{"transformer.r": true}', '{"transformer.lora_alpha": NaN}'])
def test_metadata_of_another_form_is_no_metadata(tmp_path, text):
    save_file(pair(), tmp_path / "m.safetensors", {"lora_adapter_metadata": text, "ss_network_alpha": "8"})
    assert only(tmp_path / "m.safetensors", metadata_alpha=True).scale == 1.0


def test_the_alpha_of_a_full_lokr_is_no_scale_whatever_it_is():
    stem = "layers.0.attention.to_q"
    for alpha in (9999999999.0, float("inf"), float("nan"), 0.0):
        tensors = {f"{stem}.lokr_w1": torch.randn(2, 2), f"{stem}.lokr_w2": torch.randn(3, 3),
                   f"{stem}.alpha": torch.tensor(alpha).half()}
        assert only(tensors).scale == 1.0


def test_an_orphan_factor_is_reported_and_the_rest_applies():
    orphan = {Q.replace("to_q", "to_k") + ".lora_B.weight": torch.randn(6, 2)}
    file = open_lora({**pair(), **orphan})
    assert [target.part for target in file.layers] == ["q"]
    assert file.skipped == [(key, "up without down") for key in orphan]


def test_alpha_alone_is_reported_and_the_rest_applies():
    file = open_lora({**pair(), "norm_out.linear.alpha": torch.tensor(4.0)})
    assert file.skipped == [("norm_out.linear.alpha", "alpha without an adapter")] and len(file.layers) == 1


def test_text_encoder_keys_are_given_back_and_do_not_count_as_missed():
    texts = pair("text_encoder.text_model.encoder.layers.0.self_attn.q_proj")
    file = open_lora({**pair(), **texts})
    assert file.text_encoder_keys == list(texts) and not file.unknown and len(file.layers) == 1
    alone = open_lora(texts)
    assert (alone.family, alone.layers, alone.text_encoder_keys) == (None, {}, list(texts))


def test_unknown_keys_are_listed_with_the_nearest_name():
    file = open_lora({**pair(), **pair("transformer_blocks.0.attn.to_qq")})
    assert [key for key, _ in file.unknown] == list(pair("transformer_blocks.0.attn.to_qq"))
    assert all("nearest: transformer_blocks.0.attn.to_q" in reason for _, reason in file.unknown)


def test_a_file_of_which_nothing_is_known_is_refused_with_samples():
    with pytest.raises(UnknownFamily, match="none of its 2 keys") as caught:
        open_lora(pair("foo.bar", down="lora_A.weight", up="lora_B.weight"), name="foo.safetensors")
    assert "foo.bar.lora_A.weight" in str(caught.value) and "foo.safetensors" in str(caught.value)


@pytest.mark.parametrize("stem, what", [
    ("transformer.single_transformer_blocks.0.attn.to_q", "FLUX"),
    ("lora_unet_double_blocks_0_img_attn_qkv", "FLUX"),
    ("transformer.transformer_blocks.0.ff.net.0.proj", "FLUX"),
    ("lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q", "SDXL"),
    ("diffusion_model.blocks.0.self_attn.q", "Wan"),
    ("lora_unet__blocks_0_cross_attn_k", "Wan"),
    ("diffusion_model.joint_blocks.0.x_block.attn.qkv", "Stable Diffusion 3"),
    ("diffusion_model.layers.0.adaLN_modulation.1", "Lumina 2"),
    ("transformer.transformer_blocks.0.attn1.to_q", "LTX"),
])
def test_a_lora_of_another_model_is_refused_by_name(stem, what):
    with pytest.raises(UnknownFamily, match=what):
        open_lora(pair(stem))
    for model in ("qwen-image", "z-image"):
        with pytest.raises(UnknownFamily, match="another model") as caught:
            open_lora(pair(stem), family=model)
        assert what in caught.value.found


def test_a_lumina_file_with_layers_that_z_image_has_too_is_still_lumina():
    tensors = {**pair("layers.0.attention.qkv"), **pair("layers.0.adaLN_modulation.1")}
    for model in (None, "z-image"):
        with pytest.raises(UnknownFamily, match="Lumina 2"):
            open_lora(tensors, family=model)


def test_a_flux_file_with_layers_that_qwen_has_too_is_still_flux():
    tensors = {**pair(Q), **pair("transformer.single_transformer_blocks.0.attn.to_q")}
    for model in (None, "qwen-image", "z-image"):
        with pytest.raises(UnknownFamily, match="FLUX"):
            open_lora(tensors, family=model)


@pytest.mark.parametrize("made_for, model", [("qwen-image", "z-image"), ("z-image", "qwen-image")])
def test_a_file_of_the_other_family_is_refused_with_both_names(made_for, model):
    tensors = producers.make("flymyai", made_for).tensors
    assert open_lora(tensors).family.name == made_for
    with pytest.raises(UnknownFamily) as caught:
        open_lora(tensors, family=model)
    assert {caught.value.expected, caught.value.found} == {"Qwen-Image", "Z-Image"}


def test_a_new_family_is_a_table_and_an_entry_in_the_list(monkeypatch):
    block = families.Block("blox", 2, (families.Module("mix.all", "wide", "narrow", parts=(
        ("left", ("mix.l",)), ("right", ("mix.r", "mix.right_side")))),))
    made_up = families.Family("made-up", "Made Up", {"wide": 12, "narrow": 5}, (block,), (), re.compile("blox"))
    tensors = {**pair("lora_unet_blox_1_mix_right_side"), **pair("transformer.blox.0.mix.l")}
    file = open_lora(tensors, family=made_up)
    assert [str(target) for target in file.layers] == ["blox.1.mix.all[right]", "blox.0.mix.all[left]"]
    assert made_up.shape("blox.0.mix.all", "left") == (6, 5) and len(list(made_up.targets())) == 4
    with pytest.raises(UnknownFamily):
        open_lora(tensors)
    monkeypatch.setitem(families.FAMILIES, "made-up", made_up)
    assert open_lora(tensors).family is made_up and open_lora(pair()).family.name == "qwen-image"


def test_an_unknown_family_name_is_a_value_error():
    with pytest.raises(ValueError, match="qwen-image, z-image"):
        open_lora(pair(), family="flux")


def test_a_whole_model_is_no_lora():
    with pytest.raises(UnsupportedAdapter, match="weight of the model itself"):
        open_lora({f"{Q}.weight": torch.randn(6, 5), "transformer_blocks.0.attn.to_k.weight": torch.randn(6, 5)})


def test_a_model_weight_beside_a_lora_does_not_disturb_it():
    file = open_lora({**pair(), f"{Q}.weight": torch.randn(6, 5)})
    assert len(file.layers) == 1 and [key for key, _ in file.skipped] == [f"{Q}.weight"]


def test_one_tensor_spelled_twice_is_fine_if_both_agree():
    tensors = pair()
    twice = {**tensors, **{f"transformer.{key}": tensor.clone() for key, tensor in tensors.items()}}
    file = open_lora(twice)
    assert len(file.layers) == 1 and {key for key, _ in file.skipped} == {f"transformer.{key}" for key in tensors}


@pytest.mark.parametrize("second", [pair(f"transformer.{Q}"), pair(Q, down="lora_A.b.weight", up="lora_B.b.weight"),
                                    pair(Q, rank=3, down="lora_down.weight", up="lora_up.weight")])
def test_one_tensor_spelled_twice_with_different_content_names_both_keys(second):
    with pytest.raises(FileError) as caught:
        open_lora({**pair(), **second})
    assert caught.value.key in second and f"{Q}.lora_" in str(caught.value)


def test_two_kinds_of_adapter_on_one_layer_are_refused():
    with pytest.raises(FileError, match="lora, diff"):
        open_lora({**pair(), f"{Q}.diff": torch.randn(6, 5)})


def test_of_a_fused_layer_and_its_parts_the_parts_are_used():
    fused = pair("layers.0.attention.qkv", out=18)
    split = {key: tensor for part in "qkv" for key, tensor in pair(f"layers.0.attention.to_{part}").items()}
    file = open_lora({**fused, **split})
    assert [target.part for target in file.layers] == ["q", "k", "v"]
    assert [key for key, _ in file.skipped] == list(fused) and "q, k, v" in file.skipped[0][1]


def test_of_a_fused_layer_and_some_of_its_parts_the_whole_is_used():
    fused = pair("layers.0.attention.qkv", out=18)
    some = {**pair("layers.0.attention.to_q"), **pair("layers.0.attention.to_v")}
    file = open_lora({**some, **fused, "layers.0.attention.to_k.diff_b": torch.randn(6)})
    assert {target.part for target in file.layers} == {"k", None}
    assert {key for key, _ in file.skipped} == set(some)


def test_norms_and_biases_are_layers_too():
    file = open_lora({"diffusion_model.layers.0.attention.q_norm.w_norm": torch.randn(8),
                      "diffusion_model.layers.0.attention.q_norm.b_norm": torch.randn(8),
                      "diffusion_model.layers.0.attention_norm1.diff": torch.randn(12),
                      "diffusion_model.layers.0.ffn_norm2.set_weight": torch.randn(12),
                      "diffusion_model.cap_embedder.1.diff_b": torch.randn(12)})
    kinds = {str(target): (adapter.kind, adapter.shape) for target, adapter in file.layers.items()}
    assert kinds == {"layers.0.attention.q_norm": ("diff", (8,)), "layers.0.attention_norm1": ("diff", (12,)),
                     "layers.0.ffn_norm2": ("set_weight", (12,)), "cap_embedder.1": ("bias", None)}
    delta = file.layers[Target("layers.0.attention.q_norm")].delta()
    assert delta.dense.shape == (8,) and delta.bias.shape == (8,)


@pytest.mark.parametrize("only_these", ["context_refiner.", "noise_refiner.", "adaLN", "x_embedder"])
def test_a_file_of_rarely_trained_layers_alone_changes_them(only_these):
    tensors = {key: tensor for key, tensor in producers.make("simpletuner comfyui", "z-image").tensors.items()
               if only_these in key}
    file = open_lora(tensors)
    assert len(file.layers) >= 1 and not file.unknown and not file.skipped
    assert all(product(adapter).norm() > 0 for adapter in file.layers.values())


def test_a_file_that_trains_modulation_only_is_a_qwen_file():
    file = open_lora(pair("transformer_blocks.0.img_mod.1"))
    assert file.family.name == "qwen-image"
    assert [str(target) for target in file.layers] == ["transformer_blocks.0.img_mod.1"]


def test_unsupported_kinds_are_skipped_with_the_reason():
    other = "transformer_blocks.0.attn.to_k"
    for extra, reason in (
        ({**pair(other), f"{other}.reshape_weight": torch.tensor([8, 8])}, "larger"),
        ({f"{other}.lambda_layer": torch.randn(1, 2), f"{other}.q_layer.weight": torch.randn(2, 5),
          f"{other}.p_layer.weight": torch.randn(6, 2)}, "T-LoRA"),
        ({f"{other}.oft_diag": torch.randn(2, 3, 3)}, "two different things"),
        ({f"{other}.lokr_w1": torch.randn(2, 2), f"{other}.lokr_w2_a": torch.randn(3, 2),
          f"{other}.lokr_w2_b": torch.randn(2, 3), f"{other}.lokr_t2": torch.randn(2, 2, 3, 3)}, "convolution"),
        ({f"{other}.lokr_w1": torch.randn(2, 2)}, "lokr_w2 is missing"),
        ({f"{other}.lokr_w2_b": torch.randn(2, 2), f"{other}.lokr_w1": torch.randn(2, 2)}, "lokr_w2_a is missing"),
        ({f"{other}.hada_w1_a": torch.randn(2, 2)}, "hada_w1_a without"),
        ({f"{other}.dora_scale": torch.randn(2, 1)}, "dora without an adapter"),
    ):
        file = open_lora({**pair(), **extra})
        assert [target.part for target in file.layers] == ["q"]
        assert {key for key, _ in file.skipped} == set(extra) and reason in file.skipped[0][1]


def test_an_unknown_convention_is_a_value_error():
    with pytest.raises(ValueError, match="comfyui"):
        open_lora(pair(), convention="mine")


@pytest.mark.parametrize("on", [True, False])
def test_the_garbage_collector_is_left_as_it_was(on):
    before = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        open_lora(pair())
        assert gc.isenabled() is on
        with pytest.raises(LoraError):
            open_lora({})
        assert gc.isenabled() is on
    finally:
        (gc.enable if before else gc.disable)()
