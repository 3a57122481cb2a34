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
