"""Models whose blocks are offloaded: every block must compute with its own LoRA when it sits in a buffer.

The manager is a stand-in with the contract of nunchaku's (buffers are deep copies of block 0, parameters and buffers
are copied one by one); where QPATCH_TEST_NUNCHAKU is set, the real one, its CUDA streams and devices replaced by none.
"""

import contextlib
import copy
import gc
import os
import types
import weakref

import producers
import pytest
import torch
import trees
from test_composition import bits, same, traces

from qpatch import lora

BLOCKS = 3


class StandIn:
    def __init__(self, blocks, num_blocks_on_gpu=1):
        self.blocks, self.num_blocks_on_gpu = blocks, num_blocks_on_gpu
        self.buffer_blocks = [copy.deepcopy(blocks[0]), copy.deepcopy(blocks[0])]
        self.current_block_idx = 0

    def initialize(self, stream=None):
        pass

    def get_block(self, index):
        return self.blocks[index] if index < self.num_blocks_on_gpu else self.buffer_blocks[index % 2]

    def step(self, stream=None):
        following = self.current_block_idx + 1
        if self.num_blocks_on_gpu <= following < len(self.blocks):
            source, target = self.blocks[following], self.buffer_blocks[following % 2]
            with torch.no_grad():
                for one, other in [*zip(source.parameters(), target.parameters()),
                                   *zip(source.buffers(), target.buffers())]:
                    other.copy_(one)
        self.current_block_idx = following % len(self.blocks)


def real_manager(monkeypatch):
    folder = os.environ.get("QPATCH_TEST_NUNCHAKU")
    if not folder:
        pytest.skip("QPATCH_TEST_NUNCHAKU does not name a folder with nunchaku in it")
    monkeypatch.syspath_prepend(folder)
    utils = pytest.importorskip("nunchaku.models.utils", exc_type=ImportError)
    nothing = types.SimpleNamespace(record=lambda *_: None, wait_event=lambda *_: None)
    for name in ("Event", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nothing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: nothing)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())

    class OnCpu(utils.CPUOffloadManager):
        def set_device(self, device, force=False):
            self.memory_stream = nothing

    return OnCpu


@pytest.fixture(params=["stand-in", pytest.param("nunchaku", marks=pytest.mark.nunchaku)])
def manager(request, monkeypatch):
    return StandIn if request.param == "stand-in" else real_manager(monkeypatch)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return trees.qwen(blocks=BLOCKS, h=64, f=64)


def contents(block):
    """What a block computes with: packed factors as products, all else as it is, and the rank attributes."""
    found = {}
    for name, module in block.named_modules():
        if hasattr(module, "proj_down"):
            assert module.rank == module.proj_down.shape[1]
            found[name] = trees.effective(module)
        elif hasattr(module, "wzeros"):
            found[name] = module(torch.ones(2, 64).bfloat16())
        found.update({f"{name}.{key}": value.detach().clone() for key, value in module.named_parameters(recurse=False)
                      if "proj_" not in key})
    return found


def forward(manager):
    """One pass: what the block that is handed out for each index holds at its turn."""
    manager.initialize()
    seen = []
    for index in range(BLOCKS):
        seen.append(contents(manager.get_block(index)))
        manager.step()
    return seen


def file(blocks, rank=4, seed=0, leave=()):
    """A LoRA that covers only some blocks, some layers of them."""
    dims = {**trees.QWEN_DIMS, "f": 64}
    tensors = producers.make("peft", "qwen-image", blocks=BLOCKS, rank=rank, dims=dims, seed=seed).tensors
    return {key: value for key, value in tensors.items()
            if any(f"transformer_blocks.{block}." in key for block in blocks)
            and not any(name in key for name in leave)}


def check(model, manager):
    for found, block in zip(forward(manager), model.transformer_blocks):
        wanted = contents(block)
        assert found.keys() == wanted.keys()
        for name in wanted:
            assert torch.equal(found[name], wanted[name]), name


@pytest.mark.parametrize("blocks", [[0], [1], [2], [0, 1, 2]])
def test_every_block_computes_with_its_own_lora_in_the_buffers(model, manager, blocks):
    bare = bits(model)
    model.offload_manager = manager(model.transformer_blocks)
    lora.compose(model, [(file(blocks), 0.5), (file([1], rank=20, seed=1, leave=("img_mlp", "txt_mod")), -1.0)])
    check(model, model.offload_manager)
    changed = [index for index, block in enumerate(model.transformer_blocks)
               if not torch.equal(trees.effective(block.attn.to_qkv),
                                  product(bare, f"transformer_blocks.{index}.attn.to_qkv"))]
    assert changed == sorted({*blocks, 1})
    lora.set_strengths(model, [0.25, 1.0])
    check(model, model.offload_manager)
    lora.reset(model)
    assert same(bits(model), bare) and traces(model) == []
    check(model, model.offload_manager)
    assert all(not hasattr(module, "_qpatch_lora_changes") and not module._forward_hooks
               for buffer in model.offload_manager.buffer_blocks for module in buffer.modules())


def product(state, name):
    module = torch.nn.Module()
    module.proj_down, module.proj_up = state[f"{name}.proj_down"], state[f"{name}.proj_up"]
    return trees.effective(module)


def test_all_blocks_get_the_rank_of_the_one_that_needs_most(model, manager):
    model.offload_manager = manager(model.transformer_blocks)
    lora.compose(model, [(file([1], rank=20), 1.0)])
    ranks = {block.attn.to_out[0].rank for block in model.transformer_blocks}
    assert ranks == {16 + 32}
    shapes = {tuple(block.img_mod[1].qpatch_lora_down.shape) for block in model.transformer_blocks}
    assert shapes == {(20, 64)}


def test_composing_anew_gives_the_buffers_new_shapes(model, manager):
    model.offload_manager = manager(model.transformer_blocks)
    for rank in (20, 4, 40, 40):
        lora.compose(model, [(file([2], rank=rank), 1.0)])
        check(model, model.offload_manager)


def test_offloading_that_is_switched_on_afterwards_works_and_is_reset(model, manager):
    bare = bits(model)
    lora.compose(model, [(file([0, 1, 2]), 1.0)])
    model.offload_manager = manager(model.transformer_blocks)
    check(model, model.offload_manager)
    lora.reset(model)
    assert same(bits(model), bare)
    check(model, model.offload_manager)
    lora.compose(model, [(file([1]), 1.0)])
    check(model, model.offload_manager)


def test_offloading_that_is_switched_off_leaves_a_right_model(model, manager):
    bare = bits(model)
    model.offload_manager = manager(model.transformer_blocks)
    lora.compose(model, [(file([1]), 1.0)])
    model.offload_manager = None
    lora.reset(model)
    assert same(bits(model), bare) and traces(model) == []


@pytest.mark.parametrize("blocks", [[0, 1, 2], [1]])
def test_what_was_worked_out_without_offloading_is_not_put_back_where_it_does_not_fit(model, manager, blocks):
    opened = lora.open_lora(file(blocks, rank=20))
    lora.compose(model, [(opened, 1.0)])
    lora.set_aside(model)
    model.offload_manager = manager(model.transformer_blocks)
    # Put back as it is where all blocks have the same ranks, else worked out anew.
    assert lora.compose(model, [(opened, 1.0)]).computed == (blocks == [1])
    check(model, model.offload_manager)
    lora.set_aside(model)
    check(model, model.offload_manager)
    model.offload_manager = manager(model.transformer_blocks)
    assert not lora.compose(model, [(opened, 0.5)]).computed
    check(model, model.offload_manager)
    lora.reset(model)
    check(model, model.offload_manager)


def test_a_composition_does_not_keep_buffers_alive_that_offloading_gave_up(model):
    model.offload_manager = StandIn(model.transformer_blocks)
    lora.compose(model, [(file([0, 1, 2]), 1.0)])
    buffer = weakref.ref(model.offload_manager.buffer_blocks[0].attn.to_qkv)
    model.offload_manager = None
    gc.collect()
    assert buffer() is None
