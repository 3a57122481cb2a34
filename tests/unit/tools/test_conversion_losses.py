"""Conversions that lose something, by a smaller rank or a coarser precision, state what they lose."""

import numpy as np
import producers
import pytest
import torch
from dense_changes import changes, largest_error

from qpatch.lora import LoraError, open_lora
from qpatch.lora.conversion import FORMATS, convert


def lost_share(before, after):
    """Norm of what the changes lack, over their norm."""
    lost = sum(np.sum((before[target][0] - after[target][0]) ** 2) for target in before)
    return (lost / sum(np.sum(weight**2) for weight, _ in before.values())) ** 0.5


@pytest.mark.parametrize(("producer", "kind"), [("musubi", "lora"), ("ai-toolkit", "lokr_full"), ("musubi", "loha"),
                                                ("comfyui extract", "diff")])
@pytest.mark.parametrize("name", FORMATS)
def test_a_smaller_rank_has_the_error_that_is_stated(producer, kind, name):
    example = producers.make(producer, "z-image", kind, rank=6, singles=False)
    if kind == "diff":
        # The change of a bias has no place in the diffusers format.
        example.tensors = {key: tensor for key, tensor in example.tensors.items() if not key.endswith("diff_b")}
    file = open_lora(example.tensors)
    result = convert(file, FORMATS[name], max_rank=2)
    before, after = changes(file), changes(open_lora(result.tensors))
    # In the fused form a module is as wide as its parts together.
    widest = max(adapter.rank for adapter in open_lora(result.tensors).layers.values())
    assert widest <= 2 * (3 if name == "nunchaku" else 1)
    assert result.error == pytest.approx(lost_share(before, after), rel=1e-4)
    if name == "comfyui":
        for target, error in result.errors.items():
            one, two = before[str(target)][0], after[str(target)][0]
            assert error == pytest.approx(np.linalg.norm(one - two) / np.linalg.norm(one), rel=1e-4)
            best = np.linalg.svd(one, compute_uv=False)
            assert error == pytest.approx((np.sum(best[2:] ** 2) / np.sum(best**2)) ** 0.5, rel=1e-3)


def test_layers_within_the_rank_are_not_touched():
    file = open_lora(producers.make("musubi", "z-image", rank=4).tensors)
    result = convert(file, FORMATS["kohya"], max_rank=4)
    assert result.error == 0 and not result.errors
    assert largest_error(changes(file), changes(open_lora(result.tensors))) == 0


@pytest.mark.parametrize("kind", ["lora", "lokr_full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_another_precision_has_the_error_that_is_stated(dtype, kind):
    file = open_lora(producers.make("ai-toolkit", "z-image", kind).tensors)
    result = convert(file, FORMATS["comfyui"], dtype=dtype)
    before, after = changes(file), changes(open_lora(result.tensors))
    assert {tensor.dtype for key, tensor in result.tensors.items() if not key.endswith("alpha")} == {dtype}
    assert result.error == pytest.approx(lost_share(before, after), rel=1e-3) and result.error > 1e-5


def test_numbers_that_a_precision_cannot_hold_are_refused():
    example = producers.make("ai-toolkit", "z-image")
    key = next(key for key in example.tensors if "lora_B" in key)
    example.tensors[key] = example.tensors[key] * 1e6
    with pytest.raises(LoraError, match="another precision"):
        convert(open_lora(example.tensors), FORMATS["comfyui"], dtype=torch.float16)


def test_a_full_lokr_at_real_size_needs_a_rank_and_gets_the_best_one(tmp_path):
    torch.manual_seed(0)
    w1, w2 = torch.randn(60, 60), torch.randn(64, 64)
    file = open_lora({"lycoris_layers_0_attention_out.lokr_w1": w1, "lycoris_layers_0_attention_out.lokr_w2": w2})
    with pytest.raises(LoraError, match="--rank N"):
        convert(file, FORMATS["diffusers"])
    result = convert(file, FORMATS["diffusers"], max_rank=8)
    products = torch.outer(torch.linalg.svdvals(w1.double()), torch.linalg.svdvals(w2.double()))
    values = products.flatten().sort(descending=True).values
    assert result.error == pytest.approx((values[8:].square().sum() / values.square().sum()).sqrt().item(), rel=1e-4)
    up, down = (result.tensors[f"transformer.layers.0.attention.to_out.0.lora_{name}.weight"] for name in "BA")
    assert up.shape == (3840, 8) and down.shape == (8, 3840)
