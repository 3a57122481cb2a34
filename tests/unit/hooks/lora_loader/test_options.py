"""The rank budget, and which layers are left out."""

import logging

import pytest
import torch

from qpatch.hooks.lora_loader import options


@pytest.mark.parametrize("text, rank", [("", 128), ("64", 64), (" 512 ", 512)])
def test_the_rank_budget_comes_from_the_environment(monkeypatch, text, rank):
    monkeypatch.setenv("QPATCH_MAX_RANK", text)
    assert options.max_rank() == rank


@pytest.mark.parametrize("text", ["0", "-3", "many", "1.5"])
def test_a_budget_that_is_no_positive_number_is_told_once_and_not_used(monkeypatch, caplog, text):
    monkeypatch.setenv("QPATCH_MAX_RANK", text)
    options._rank.cache_clear()
    with caplog.at_level(logging.WARNING, logger="qpatch"):
        assert [options.max_rank(), options.max_rank()] == [128, 128]
    assert len(caplog.records) == 1 and repr(text) in caplog.text


def model(quantized=True, rows=None):
    block = type("Block", (torch.nn.Module,), {} if rows is None else {options.ROWS: rows})()
    layer = torch.nn.Linear(2, 2)
    if quantized:
        layer.wzeros = torch.zeros(1)
    block.img_mod = torch.nn.Sequential(torch.nn.SiLU(), layer)
    tree = torch.nn.Module()
    tree.transformer_blocks = torch.nn.ModuleList([block])
    return tree


def test_modulation_layers_stay_in_when_their_rows_are_vouched_for():
    assert options.leave_out(model(rows=options.INTERLEAVED)) is None


@pytest.mark.parametrize("rows", [None, "planar"])
def test_modulation_layers_of_unknown_order_are_left_out_with_a_reason_that_names_the_hook(rows):
    tree = model(rows=rows)
    chosen = options.leave_out(tree)
    layer = tree.transformer_blocks[0].img_mod[1]
    assert "qwen-modulation" in chosen("transformer_blocks.0.img_mod.1", layer)
    assert chosen("transformer_blocks.0.attn.to_qkv", torch.nn.Linear(2, 2)) is None
    # The same answer each time: a composition is found again by it.
    assert chosen is options.leave_out(tree)


def test_modulation_layers_that_are_not_quantized_are_no_concern():
    assert options.leave_out(model(quantized=False)) is None
