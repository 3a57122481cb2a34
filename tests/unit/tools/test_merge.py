"""A stack as one file: the sum of its files' changes, against dense float64; what cannot be merged is refused."""

import json

import numpy as np
import producers
import pytest
import torch
from dense_changes import changes

from qpatch.lora import LoraError, UnknownFamily, open_lora
from qpatch.lora.conversion import FORMATS, merge


def summed(files):
    """target -> (sum of the changes of the weight, of the bias)."""
    total = {}
    for file, strength in files:
        for target, arrays in changes(file).items():
            found = total.setdefault(target, [None, None])
            for number, array in enumerate(arrays):
                if array is not None:
                    found[number] = strength * array + (0 if found[number] is None else found[number])
    return total


def check(result, files, tolerance):
    after = changes(open_lora(result.tensors))
    before = summed(files)
    assert set(after) == set(before)
    for target, arrays in before.items():
        for wanted, found in zip(arrays, after[target]):
            assert (wanted is None) == (found is None), target
            if wanted is not None:
                assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max(), target


def opened(*asked, family="z-image", **how):
    made = [producers.make(producer, family, kind, seed=seed, **how) for seed, (producer, kind, _) in enumerate(asked)]
    return [(open_lora(example.tensors, name=f"{producer} {seed}"), strength)
            for seed, (example, (producer, _, strength)) in enumerate(zip(made, asked))]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["qwen-image", "z-image"])
def test_ranks_add_up_and_the_change_is_the_sum(family, name):
    asked = ("musubi", "lora", 0.8), ("ai-toolkit", "lora", -0.5), ("lightning", "lora", 2.0)
    files = opened(*asked, family=family, rank=3)
    result = merge(files, FORMATS[name])
    check(result, files, 1e-6)
    assert result.error < 1e-7


def test_one_file_at_strength_1_is_bitwise_itself():
    (file,) = opened(("ai-toolkit", "lora", 1.0), dtype=torch.bfloat16)
    result = merge([file], FORMATS["comfyui"])
    assert all(torch.equal(result.tensors[key], file[0].source.tensor(key)) for key in file[0].source.entries)


def test_equal_scales_are_merged_without_any_rounding():
    files = opened(("musubi", "lora", 0.7), ("musubi", "lora", 0.7), dtype=torch.bfloat16)
    result = merge(files, FORMATS["kohya"])
    check(result, files, 1e-12)
    factors = [tensor for key, tensor in result.tensors.items() if not key.endswith(".alpha")]
    assert {tensor.dtype for tensor in factors} == {torch.bfloat16}
    assert not result.errors


def test_ranks_and_alphas_of_every_layer_may_differ():
    first, second = (producers.make("musubi", "z-image", rank=rank, alpha=alpha, seed=rank)
                     for rank, alpha in ((2, 1.0), (5, 3.0)))
    for key in list(second.tensors):
        if "feed_forward_w2" in key and key.endswith("alpha"):
            second.tensors[key] = torch.tensor(0.3)
        if "attention_to_k" in key:
            del second.tensors[key]
    files = [(open_lora(first.tensors), 0.8), (open_lora(second.tensors), 0.5)]
    result = merge(files, FORMATS["kohya"])
    check(result, files, 1e-6)
    ranks = {str(target): adapter.rank for target, adapter in open_lora(result.tensors).layers.items()}
    assert ranks["layers.0.attention.qkv[q]"] == 7 and ranks["layers.0.attention.qkv[k]"] == 2


def test_a_fused_layer_and_its_parts_are_added_up():
    files = opened(("diffusion-pipe", "lora", 0.8), ("ai-toolkit", "lora", 0.5))
    for name in FORMATS:
        check(merge(files, FORMATS[name]), files, 1e-6)


def test_kronecker_and_hadamard_products_of_small_rank_are_merged_as_factors():
    files = opened(("musubi", "lokr", 0.8), ("musubi", "loha", 0.5), rank=2)
    check(merge(files, FORMATS["diffusers"]), files, 1e-6)


def test_full_differences_and_biases_are_added_up_where_the_format_has_a_place():
    files = opened(("ai-toolkit", "diff", 0.8), ("ai-toolkit", "lora", 0.5), ("ai-toolkit", "lora_bias", -1.0))
    check(merge(files, FORMATS["comfyui"]), files, 1e-6)
    for name in ("diffusers", "nunchaku"):
        with pytest.raises(LoraError, match="no place"):
            merge(files, FORMATS[name])


def test_a_rank_budget_has_the_error_that_is_stated():
    files = opened(("musubi", "lora", 0.8), ("ai-toolkit", "lora", 0.5), ("ai-toolkit", "lokr_full", 1.0), rank=4)
    result = merge(files, FORMATS["comfyui"], max_rank=3)
    before, after = summed(files), changes(open_lora(result.tensors))
    lost = sum(np.sum((weight - after[target][0]) ** 2) for target, (weight, _) in before.items())
    total = sum(np.sum(weight**2) for weight, _ in before.values())
    assert result.error == pytest.approx((lost / total) ** 0.5, rel=1e-4)
    assert {adapter.rank for adapter in open_lora(result.tensors).layers.values()} == {3}


@pytest.mark.parametrize(("kind", "producer"), [("dora_flat", "peft"), ("peft_oft", "peft"),
                                                ("set_weight", "comfyui extract")])
def test_what_depends_on_the_base_is_refused_with_file_and_key(kind, producer):
    files = opened(("ai-toolkit", "lora", 1.0), (producer, kind, 1.0))
    with pytest.raises(LoraError, match="depends on the base weight") as refused:
        merge(files, FORMATS["comfyui"])
    assert refused.value.file and refused.value.key


def test_layers_that_cannot_be_merged_are_dropped_when_asked_and_listed():
    good, bad = producers.make("ai-toolkit", "z-image"), producers.make("peft", "z-image", "dora_flat")
    bad.tensors = {key: tensor for key, tensor in bad.tensors.items() if "attention.to_q." in key}
    files = [(open_lora(good.tensors), 1.0), (open_lora(bad.tensors), 1.0)]
    result = merge(files, FORMATS["comfyui"], drop=True)
    assert result.layers == len(good.layers) - 3 and len(result.left_out) == 3


def test_strength_0_leaves_a_file_out_of_the_sum_and_in_the_history():
    files = opened(("ai-toolkit", "lora", 1.0), ("musubi", "lora", 0.0))
    result = merge(files, FORMATS["comfyui"], made_by="qpatch 9")
    check(result, files[:1], 0)
    (step,) = json.loads(result.metadata["qpatch.history"])
    assert [tuple(source.values()) for source in step["sources"]] == [("ai-toolkit 0", 1.0), ("musubi 1", 0.0)]


def test_files_for_different_models_are_refused():
    files = [*opened(("ai-toolkit", "lora", 1.0)), *opened(("ai-toolkit", "lora", 1.0), family="qwen-image")]
    with pytest.raises(UnknownFamily):
        merge(files, FORMATS["comfyui"])


def test_text_encoders_are_kept_of_one_file_and_left_out_of_a_sum():
    plain = producers.make("musubi", "z-image")
    texts = {"lora_te_layers_0.lora_down.weight": torch.ones(2, 3)}
    file, other = open_lora({**plain.tensors, **texts}, name="a"), open_lora({**plain.tensors, **texts}, name="b")
    assert merge([(file, 1.0), (open_lora(plain.tensors), 0.5)], FORMATS["kohya"]).text_encoder_keys == 1
    for files in ([(file, 1.0), (other, 1.0)], [(file, 0.5)]):
        result = merge(files, FORMATS["kohya"])
        assert result.text_encoder_keys == 0 and "text encoder" in result.left_out[-1][1]


def test_a_stack_of_strength_0_alone_is_refused():
    with pytest.raises(LoraError, match="nothing to merge"):
        merge(opened(("ai-toolkit", "lora", 0.0), ("musubi", "lora", 0.0)), FORMATS["comfyui"])
