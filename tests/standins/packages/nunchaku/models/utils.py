"""Stand-in for nunchaku's helpers: one Linear of several, without weights; blocks that take turns in two buffers."""

import copy

import torch
from torch import nn


def fuse_linears(linears):
    assert len(linears) > 0
    if len(linears) == 1:
        return linears[0]
    first = linears[0]
    assert all(linear.in_features == first.in_features for linear in linears)
    return nn.Linear(
        first.in_features,
        sum(linear.out_features for linear in linears),
        bias=all(linear.bias is not None for linear in linears),
        dtype=first.weight.dtype,
        device=first.weight.device,
    )


def copy_params_into(source, target):
    """Parameters and buffers by position, as upstream does it."""
    with torch.no_grad():
        for one, other in zip(source.parameters(), target.parameters()):
            other.copy_(one)
        for one, other in zip(source.buffers(), target.buffers()):
            other.copy_(one)


class CPUOffloadManager:
    def __init__(self, blocks, num_blocks_on_gpu=1, **unused):
        self.blocks, self.num_blocks_on_gpu = blocks, num_blocks_on_gpu
        self.buffer_blocks = [copy.deepcopy(blocks[0]), copy.deepcopy(blocks[0])]

    def get_block(self, index):
        if index < self.num_blocks_on_gpu:
            return self.blocks[index]
        copy_params_into(self.blocks[index], self.buffer_blocks[index % 2])
        return self.buffer_blocks[index % 2]
