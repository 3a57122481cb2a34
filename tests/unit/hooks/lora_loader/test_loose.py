"""ComfyUI's parsed patches, back as the tensors of a LoRA file."""

from types import SimpleNamespace

import pytest
import torch

from qpatch.hooks.lora_loader.loose import as_file
from qpatch.lora.families import get

QWEN, Z = get("qwen-image"), get("z-image")
UP, DOWN = torch.ones(4, 2), torch.ones(2, 3)


def adapter(name, *weights):
    return SimpleNamespace(name=name, weights=weights)


LORA = adapter("lora", UP, DOWN, 8.0, None, None, None)


def test_a_lora_of_a_split_layer_keeps_its_name_factors_and_alpha():
    found = as_file("diffusion_model.transformer_blocks.0.attn.to_q.weight", LORA, QWEN)
    stem = "diffusion_model.transformer_blocks.0.attn.to_q"
    assert set(found) == {f"{stem}.lora_up.weight", f"{stem}.lora_down.weight", f"{stem}.alpha"}
    assert found[f"{stem}.lora_up.weight"] is UP and float(found[f"{stem}.alpha"]) == 8.0


@pytest.mark.parametrize("start, name", [(0, "to_q"), (3840, "to_k"), (7680, "to_v")])
def test_rows_of_the_fused_weight_become_the_layer_they_came_from(start, name):
    found = as_file(("diffusion_model.layers.3.attention.qkv.weight", (0, start, 3840)), LORA, Z)
    assert f"diffusion_model.layers.3.attention.{name}.lora_up.weight" in found


def test_rows_that_are_no_part_of_the_weight_are_left_to_comfyui():
    for offset in ((1, 0, 3840), (0, 100, 3840), (0, 11520, 3840)):
        assert as_file(("diffusion_model.layers.3.attention.qkv.weight", offset), LORA, Z) is None


def test_a_whole_fused_weight_stays_whole():
    assert "diffusion_model.layers.3.attention.qkv.lora_down.weight" in as_file(
        "diffusion_model.layers.3.attention.qkv.weight", LORA, Z)


@pytest.mark.parametrize("kind, count, suffix", [
    ("loha", 8, "hada_w1_a"), ("lokr", 9, "lokr_w1"), ("glora", 6, "a1.weight"), ("oft", 4, "oft_blocks"),
    ("boft", 4, "oft_blocks"),
])
def test_every_kind_of_adapter_is_written_under_its_suffixes(kind, count, suffix):
    found = as_file("diffusion_model.layers.0.feed_forward.w1.weight", adapter(kind, UP, *[None] * (count - 1)), Z)
    assert found == {f"diffusion_model.layers.0.feed_forward.w1.{suffix}": UP}


def test_differences_and_replacements_keep_their_meaning():
    key = "diffusion_model.layers.0.feed_forward.w2"
    assert as_file(f"{key}.weight", ("diff", (UP,)), Z) == {f"{key}.diff": UP}
    assert as_file(f"{key}.weight", (UP,), Z) == {f"{key}.diff": UP}
    assert as_file(f"{key}.bias", ("diff", (UP,)), Z) == {f"{key}.diff_b": UP}
    assert as_file(f"{key}.weight", ("set", (UP,)), Z) == {f"{key}.set_weight": UP}


def test_what_no_file_says_is_left_to_comfyui():
    key = "diffusion_model.layers.0.feed_forward.w2.weight"
    assert as_file(key, [(UP, None)], Z) is None  # model merging
    assert as_file(key, ("model_as_lora", (UP,)), Z) is None
    assert as_file((key, None, lambda weight: weight), LORA, Z) is None
    assert as_file("diffusion_model.elsewhere.weight", LORA, Z) is None
    assert as_file("diffusion_model.layers.0.feed_forward.w2.qweight", LORA, Z) is None
