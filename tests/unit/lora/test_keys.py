"""Every spelling of a key that is known to be written by somebody, and what it means."""

import difflib
import re
from pathlib import Path

import producers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qpatch.lora import families
from qpatch.lora.keys import Resolver, Role, Target, read, resolve
from qpatch.lora.nearest import LIMIT, Nearest

FIXTURES = [line.split(" => ") for line in Path(__file__).with_name("fixtures_keys.txt").read_text().splitlines()]


@pytest.mark.parametrize("key, meaning", FIXTURES)
def test_fixture_resolves_to_its_target_and_role(key, meaning):
    target, role = meaning.split(" | ")
    resolved = resolve(key)
    if target == "SKIP":
        assert (resolved.skipped, resolved.target) == (role, None)
    else:
        assert (str(resolved.target), resolved.role) == (target, Role(role))
        assert resolved.unknown is None and resolved.skipped is None


# The full keys that trainers write, as regexes made from their code; an independent check of producers.py.
QD = (r"transformer_blocks\.\d+\.(attn\.(to_[qkv]|add_[qkv]_proj|to_out(\.0)?|to_add_out|to_qkv|add_qkv_proj)"
      r"|(img|txt)_mlp\.net\.(0\.proj|2)|(img|txt)_mod\.1)")
QF = (r"transformer_blocks_\d+_(attn_(to_[qkv]|add_[qkv]_proj|to_out(_0)?|to_add_out)"
      r"|(img|txt)_mlp_net_(0_proj|2)|(img|txt)_mod_1)")
QG = r"img_in|txt_in|txt_norm|proj_out|norm_out[._]linear|time_text_embed[._]timestep_embedder[._]linear_[12]"
ZD = (r"(layers|noise_refiner|context_refiner)\.\d+\.(attention\.(to_[qkv]|to_out(\.0)?|qkv|out)"
      r"|feed_forward\.(w[123]|net\.0\.proj|net\.2)|adaLN_modulation\.0)")
ZF = (r"(layers|noise_refiner|context_refiner)_\d+_(attention_(to_[qkv]|to_out(_0)?|qkv|out)"
      r"|feed_forward_w[123]|adaLN_modulation_0)")
ZG = (r"(all_)?x_embedder([._]2-1)?|cap_embedder[._][01]|t_embedder[._]mlp[._][02]"
      r"|(all_)?final_layer([._]2-1)?[._](linear|adaLN_modulation[._]1)")
D, F = f"(?:{QD}|{ZD}|{QG}|{ZG})", f"(?:{QF}|{ZF}|{QG}|{ZG})"
WRITTEN = {
    "musubi": rf"lora_unet_{F}\.(?:lora_(?:down|up)\.weight|alpha|lokr_w1|lokr_w2(?:_[ab])?|hada_w[12]_[ab])",
    "musubi comfy": rf"lora_unet_{F}\.(?:lora_(?:down|up)\.weight|alpha)",
    "kohya fused": rf"lora_unet_{F}\.(?:lora_(?:down|up)\.weight|alpha)",
    "anime-z": rf"lora_unet_{F}\.(?:lora_(?:down|up)\.weight|alpha)",
    "blissful": rf"lora_unet_{F}\.(?:lora_(?:down|up)\.weight|alpha|dora_layer\.weight)|use_(?:rslora|dora)_flag",
    "musubi other": rf"diffusion_model\.{D}\.(?:lora_[AB]\.weight|lokr_w[12](?:_[ab])?|hada_w[12]_[ab]|alpha)",
    "ai-toolkit": rf"diffusion_model\.{D}\.(?:lora_[AB]\.(?:weight|bias)|magnitude|diff|diff_b|lokr_w[12](?:_[ab])?"
                  r"|alpha)",
    "onetrainer legacy": rf"transformer\.{D}\.(?:lora_(?:down|up)\.weight|alpha|dora_scale|hada_w[12]_[ab]"
                         r"|lokr_w[12](?:_[ab])?|oft_R\.weight)",
    "onetrainer diffusers": rf"transformer\.{D}\.(?:lora_[AB]\.weight|lora_magnitude_vector\.weight)",
    "diffusion-pipe": rf"diffusion_model\.{D}\.(?:lora_[AB]\.weight|lokr_w[12](?:_[ab])?)",
    "diffsynth": rf"{D}\.lora_[AB]\.default\.weight",
    "diffsynth pipe": rf"pipe\.dit\.{D}\.lora_[AB]\.default\.weight",
    "simpletuner": rf"transformer\.{D}\.lora_[AB]\.weight",
    "simpletuner comfyui": rf"diffusion_model\.{D}\.(?:lora_[AB]\.weight|alpha)",
    "simpletuner lycoris": rf"lycoris_{F}\.(?:lora_(?:down|up)\.weight|lokr_w[12](?:_[ab])?|hada_w[12]_[ab]|alpha"
                           r"|dora_scale|diff(?:_b)?|oft_blocks|rescale|[ab][12]\.weight|weight|on_input)",
    "lightning": rf"{D}\.(?:lora_(?:down|up)\.weight|alpha)",
    "videox-fun": rf"lora_unet__{F}\.(?:lora_(?:down|up)\.weight|alpha)",
}


@pytest.mark.parametrize("producer", WRITTEN)
def test_synthetic_files_are_spelled_as_the_trainer_spells_them(producer):
    rules = producers.PRODUCERS[producer]
    for family in rules.families:
        for kind in rules.kinds:
            for key in producers.make(producer, family, kind).tensors:
                assert re.fullmatch(WRITTEN[producer], key), key


PREFIXES = {"": ".", "transformer.": ".", "diffusion_model.": ".", "base_model.model.": ".", "pipe.dit.": ".",
            "model.diffusion_model.": ".", "base_model.model.transformer.": ".", "transformer.diffusion_model.": ".",
            "base_model.model.transformer.diffusion_model.": ".", "base_model.": ".", "dit.": ".", "model.": ".",
            "lora_unet_": "_", "lora_unet__": "_", "lycoris_": "_", "lora_transformer_": "_"}
ENDINGS = ("lora_A.weight", "lora_A.default.weight", "lora_A.lightning.weight", "lora_down.weight", "lokr_w1", "alpha")


@pytest.mark.parametrize("family", families.FAMILIES.values(), ids=lambda family: family.name)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_name_of_every_module_resolves_under_every_prefix(family, prefix):
    for block in family.blocks:
        for module in block.modules:
            for name, (canonical, part) in module.spellings():
                written = f"{block.name}.1.{name}".replace(".", PREFIXES[prefix])
                for ending in ENDINGS:
                    resolved = resolve(f"{prefix}{written}.{ending}", family)
                    assert resolved.target == Target(f"{block.name}.1.{canonical}", part), written
    for module in family.singles:
        for name, _ in module.spellings():
            resolved = resolve(f"{prefix}{name.replace('.', PREFIXES[prefix])}.lora_B.weight", family)
            assert resolved.target == Target(module.name)


def test_no_two_layers_share_a_spelling_within_or_between_families():
    names = [name for family in families.FAMILIES.values() for name in family.spellings()]
    for separator in ("._", "__"):
        flat = [name.replace(".", separator[1]) for name in names]
        assert len(set(flat)) == len(set(names))


ROLES = {
    "lora_up.weight": "up", "lora_mid.weight": "mid", "lora_B": "up", "lora_A": "down", "lora.down.weight": "down",
    "lora_linear_layer.up.weight": "up", "lora_B.bias": "up_bias", "lora_B.default.bias": "up_bias", "alpha": "alpha",
    "lora_alpha.default": "alpha", "scale": "scale", "dora_scale": "dora", "magnitude": "dora",
    "dora_layer.weight": "dora",
    "lora_magnitude_vector": "dora", "lora_magnitude_vector.default": "dora",
    "lora_magnitude_vector.default.weight": "dora", "lokr_w1": "lokr_w1", "lokr_w1_a": "lokr_w1_a",
    "lokr_w2_b.default": "lokr_w2_b", "lokr_t2": "lokr_t2", "hada_w2_a": "hada_w2_a", "hada_w1_b.default": "hada_w1_b",
    "hada_t1": "hada_t1", "a1.weight": "glora_a1", "b2.weight": "glora_b2", "bm.weight": "glora_bm",
    "oft_blocks": "oft_blocks", "oft_diag": "oft_diag", "rescale": "rescale", "oft_R.weight": "oft_r",
    "oft_R.default.weight": "oft_r", "oft_R.scaled_oft": "oft_scaled", "on_input": "ia3_on_input",
    "weight": "ia3_weight", "lambda_layer": "tlora", "p_layer.weight": "tlora_p",
    "ia3_l": "ia3_l", "ia3_l.default": "ia3_l", "diff": "diff", "diff_b": "diff_b", "set_weight": "set_weight",
    "w_norm": "w_norm", "b_norm": "b_norm", "reshape_weight": "reshape_weight",
}


@pytest.mark.parametrize("ending", ROLES)
@pytest.mark.parametrize("stem", ["layers.0.attention.to_q", "lora_unet_layers_0_attention_to_q"])
def test_every_ending_has_its_role(ending, stem):
    resolved = resolve(f"{stem}.{ending}")
    assert (resolved.role, resolved.target) == (Role(ROLES[ending]), Target("layers.0.attention.qkv", "q"))


@pytest.mark.parametrize("key", [
    "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_up.weight", "lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha",
    "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight",
    "text_encoder_2.encoder.block.0.lora_A.weight", "base_model.model.text_encoder.layers.0.lora_A.weight",
    "text_encoders.qwen25_7b.transformer.model.layers.0.lora_B.weight",
])
def test_text_encoder_keys_are_left_to_the_caller(key):
    resolved = resolve(key)
    assert resolved.skipped == "text encoder" and resolved.unknown is None


@pytest.mark.parametrize("key, nearest", [
    ("transformer_blocks.3.attn.to_qq.lora_A.weight", "transformer_blocks.3.attn.to_q"),
    ("lora_unet_layers_7_attention_to_outt_0.lora_down.weight", "layers.7.attention.to_out.0"),
    ("diffusion_model.noise_refiner.1.feed_forward.w4.lora_A.weight", "noise_refiner.1.feed_forward.w"),
    ("layers.2.attention.to_q.lora_X", "layers.2.attention.to_q"),
    ("layers.2.attention.to_q.boft_R.weight", "layers.2.attention.to_q"),
])
def test_unknown_key_is_reported_with_the_nearest_name(key, nearest):
    assert f"nearest: {nearest}" in resolve(key).unknown


@pytest.mark.parametrize("ending", ["lora_X", "lora_C.weight", "boft_R.weight", "vera_lambda_b", "nonsense"])
def test_an_ending_that_is_not_known_is_said_to_be_the_problem(ending):
    assert "its ending is none that an adapter has" in resolve(f"layers.2.attention.to_q.{ending}").unknown


def test_unknown_key_of_another_model_says_which_model():
    assert "FLUX" in resolve("transformer.single_transformer_blocks.3.attn.to_q.lora_A.weight", "qwen-image").unknown


@pytest.mark.parametrize("key", [
    "transformer_blocks.00.attn.to_q.alpha", "transformer_blocks.-1.attn.to_q.alpha",
    "transformer_blocks_0.attn.to_q.alpha", "transformer_blocks.0_attn_to_q.alpha", "layers.0.attention_to_q.alpha",
    "layers.0.attention.to_q", "alpha", ".alpha", "",
    "context_refiner.0.adaLN_modulation.0.alpha", "blocks.0.attn.to_q.lora_A.weight",
])
def test_names_that_only_resemble_a_layer_do_not_resolve(key):
    assert resolve(key).target is None and resolve(key).unknown


def test_thousands_of_unknown_names_are_compared_a_bounded_number_of_times(monkeypatch):
    compared = []
    monkeypatch.setattr(difflib, "get_close_matches", lambda name, *rest, **options: compared.append(name) or [])
    nearest = Nearest(families.FAMILIES.values())
    for index in range(5000):
        assert nearest(read(f"block{index}.something.lora_A.weight"))
        assert nearest(read(f"layers.{index}.something.lora_A.weight"))
    assert len(compared) == LIMIT


@given(st.text(alphabet="._-abqkv0123transformer_blockslayersattentionwTo", max_size=60))
def test_any_text_as_a_key_is_answered(text):
    for family in families.FAMILIES.values():
        resolved = Resolver(family)(text)
        assert resolved.target is None or resolved.role is not None
        assert resolved.target is not None or resolved.unknown is not None or resolved.skipped is not None
