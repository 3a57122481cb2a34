"""Tied modules: one module object under two names."""

import expected
import pytest
import torch
import trees

from qpatch import lora

BLOCK = "transformer_blocks.{}.attn.to_out.0"


@pytest.fixture
def root():
    torch.manual_seed(0)
    root = trees.qwen(blocks=2)
    root.transformer_blocks[1].attn.to_out = root.transformer_blocks[0].attn.to_out
    return root


def pair(block, seed=0):
    generator = torch.Generator().manual_seed(seed)
    stem = f"transformer.{BLOCK.format(block)}"
    return {f"{stem}.lora_A.weight": torch.randn(4, 64, generator=generator) * 0.1,
            f"{stem}.lora_B.weight": torch.randn(64, 4, generator=generator) * 0.1}


def product(tensors):
    down, up = tensors.values()
    return up.double() @ down.double()


@pytest.mark.parametrize("blocks", [(0,), (1,), (0, 1)])
def test_a_file_that_names_it_once_or_twice_changes_it_once(root, blocks):
    layer = root.get_submodule(BLOCK.format(0))
    before = trees.effective(layer)
    tensors = {key: tensor for block in blocks for key, tensor in pair(block).items()}
    file = lora.compose(root, [(tensors, 1.0)]).files[0]
    assert (file.applied, file.total, file.misses, file.share) == (len(blocks), len(blocks), [], 1.0)
    assert expected.relative(trees.effective(layer) - before, product(pair(0))) < 6e-3
    lora.reset(root)
    assert torch.equal(trees.effective(layer), before)


def test_a_file_that_says_two_different_things_about_it_is_told_so(root):
    file = lora.compose(root, [({**pair(0), **pair(1, seed=1)}, 1.0)]).files[0]
    assert file.applied == 1 and file.total == 2
    (key, reason), = file.misses
    assert key.startswith(f"transformer.{BLOCK.format(1)}")
    assert "the same module as" in reason and BLOCK.format(0) in reason


def test_two_files_that_name_it_differently_both_act(root):
    layer = root.get_submodule(BLOCK.format(0))
    before = trees.effective(layer)
    lora.compose(root, [(pair(0), 1.0), (pair(1, seed=1), 0.5)])
    assert expected.relative(trees.effective(layer) - before, product(pair(0)) + 0.5 * product(pair(1, seed=1))) < 6e-3
    lora.reset(root)
    assert torch.equal(trees.effective(layer), before)
