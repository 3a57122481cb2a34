"""The share of a file that took effect, also where its changes are products that are never built as a whole."""

import producers
import pytest
import torch
import trees

from qpatch import lora


@pytest.mark.parametrize("kind", ["lora", "lokr_full", "loha", "diff"])
def test_the_share_counts_every_kind_of_change(kind):
    tensors = producers.make("simpletuner lycoris", "qwen-image", kind, rank=16, dims=trees.QWEN_DIMS).tensors
    stem = "lycoris_transformer_blocks_7_attn_to_q"
    missing = {f"{stem}.lora_down.weight": torch.ones(2, 64), f"{stem}.lora_up.weight": torch.ones(64, 2)}
    (entry,) = lora.plan(trees.qwen(), [({**tensors, **missing}, 1.0)]).report.files
    assert [target for target, _ in entry.misses] and 0.5 < entry.share < 1.0


@pytest.mark.parametrize("value, share", [(1.0, 0.5), (float("nan"), 1.0)])
def test_a_layer_that_no_model_has_weighs_in_the_share_if_its_numbers_can_be_measured(value, share):
    def layer(name, scale):
        return {f"transformer_blocks.0.attn.{name}.lora_A.weight": torch.ones(2, 64),
                f"transformer_blocks.0.attn.{name}.lora_B.weight": torch.full((64, 2), scale)}

    loras = [({**layer("to_q", 1.0), **layer("to_w", value)}, 1.0)]
    (entry,) = lora.plan(trees.qwen(), loras).report.files
    assert (entry.applied, entry.total) == (1, 2) and entry.share == pytest.approx(share)
    assert {key for key, _ in entry.misses} == set(layer("to_w", value))
