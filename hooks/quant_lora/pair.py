"""All terms of one layer as one pair of factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from .splitting import Placed


@dataclass(frozen=True)
class Pair:
    """``up @ down`` is the change of the weight, strengths included. ``down``: [rank, in], ``up``: [out, rank]."""

    down: torch.Tensor
    up: torch.Tensor

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + self.up.nbytes

    def added_to(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``output + (x @ down^T) @ up^T`` for x [..., in] and output [..., out]; computed in output's dtype."""
        down, up = self.down.to(output.device, output.dtype), self.up.to(output.device, output.dtype)
        small = linear(x.to(output.dtype), down)
        # One kernel, and no second tensor of the size of the output.
        return torch.addmm(output.reshape(-1, up.shape[0]), small.reshape(-1, up.shape[1]), up.t()).view(output.shape)


def compose(placed: Sequence[Placed], shape: tuple[int, int], dtype: torch.dtype, device) -> Pair | None:
    """The terms one below the other; None where there are none. Strength and scale go into ``up``."""
    rank = sum(one.term.rank for one in placed)
    if not rank:
        return None
    down = torch.zeros(rank, shape[1], dtype=dtype, device=device)
    up = torch.zeros(shape[0], rank, dtype=dtype, device=device)
    start = 0
    for one in placed:
        stop = start + one.term.rank
        down_values, up_values = _balanced(one, device)
        down[start:stop, one.columns] = down_values
        up[one.rows, start:stop] = up_values
        start = stop
    return Pair(down, up)


def _balanced(one: Placed, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Both factors in float32, of about the same size: trainers make up a thousand times smaller, and float16
    would round it to nothing. The power of two that moves between them is exact."""
    down = one.term.down.to(device=device, dtype=torch.float32)
    up = one.term.up.to(device=device, dtype=torch.float32) * (one.term.scale * one.strength)
    largest, smaller = down.abs().max().item(), up.abs().max().item()
    if not largest or not smaller:
        return down, up
    power = 2.0 ** round(math.log2(largest / smaller) / 2)
    return down / power, up * power
