"""AWQW4A16Linear: a low-rank branch beside the quantized forward, as a forward hook and two buffers.

The layer has no branch of its own. Hooks do fire on it: the models call it as a module. The hook holds
nothing; the factors are buffers of the module, so that they move, convert and are copied with it. They are
not in the state dict.

In nunchaku's models these are modulation layers, whose rows are stored interleaved, [dim, splits] for the
original's [splits, dim]: the block transposes the output. So are the rows of our up factor and of the bias.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import linear

from .. import dequantize
from .blocks import Block, Blocks, Scale, fits, normalized
from .change import Change
from .placed import gather
from .site import Draft, Site, not_loaded
from .sums import bias_sum

DOWN, UP = "qpatch_lora_down", "qpatch_lora_up"


class LowRankBranch:
    """Adds ``(x @ down.T) @ up.T`` to the output of the module it hooks, with the module's own buffers."""

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> torch.Tensor:
        x = args[0] if args else next(iter(kwargs.values()))
        down, up = getattr(module, DOWN), getattr(module, UP)
        return output + linear(linear(x.to(down.dtype), down), up).to(output.dtype)


class BranchSite(Site):
    """A module whose forward gets a branch; subclasses know its weight and the order of its rows."""

    #: Rows [splits, dim] of the original layer stand as [dim, splits].
    splits = 1

    @property
    @abc.abstractmethod
    def like(self) -> torch.Tensor:
        """The tensor whose dtype and device, as they are now, the branch takes on."""

    @property
    def has_bias(self):
        return self.bare("bias") is not None

    def stored(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [out, ...] of the original layer in the order of this one."""
        return rows if self.splits == 1 else rows.unflatten(0, (self.splits, -1)).transpose(0, 1).flatten(0, 1)

    def natural(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`stored`."""
        return rows if self.splits == 1 else rows.unflatten(0, (-1, self.splits)).transpose(0, 1).flatten(0, 1)

    def bias(self):
        return self.natural(self.bare("bias").detach().float())

    def draft(self, parts, strengths, max_rank):
        return BranchDraft(self, parts, strengths, max_rank)


class AWQSite(BranchSite):
    kind = "awq"

    def __init__(self, path: str, owner: nn.Module):
        scales = owner.wscales
        if scales is None or scales.is_meta:
            raise not_loaded(path)
        super().__init__(path, owner, scales.shape[1], owner.qweight.shape[1] * 2)
        self.splits = self.out // self.inp if self.out % self.inp == 0 else 1

    @property
    def like(self):
        return self.owner.wscales

    def bias(self):
        """The exporter adds the 1 of ``1 + scale`` to the chunks that are scales: second and last but one."""
        chunks = super().bias().unflatten(0, (self.splits, -1)).clone()
        if self.splits > 1:
            chunks[sorted({1, self.splits - 2})] -= 1
        return chunks.flatten()

    def weight(self):
        qweight, wscales, wzeros = (self.bare(name) for name in ("qweight", "wscales", "wzeros"))
        return self.natural(dequantize.awq(qweight, wscales, wzeros, self.out, self.inp))


class BranchDraft(Draft):
    def __init__(self, site: BranchSite, parts, strengths: Sequence[float], max_rank: int):
        self.site, self.strengths = site, strengths
        self.branch = gather(site, parts, strengths, max_rank)
        self.bias = bias_sum(site, parts, strengths, site.stored)
        self.lines = self.branch.lines
        self.rank = self.branch.ranks

    def build(self, rank=None):
        site, change = self.site, Change(self.site.owner, self.site.path, {}, fixed=self.branch.fixed)
        rank = self.rank if rank is None else rank
        if rank:
            down = torch.zeros(rank, site.inp, dtype=site.like.dtype, device=site.like.device)
            up = torch.zeros(site.out, rank, dtype=site.like.dtype, device=site.like.device)
            live = Blocks(UP, site.path, _itself)
            live.fill(up, self._blocks(down), self.strengths)
            change.values.update({DOWN: down, UP: up})
            change.hook = LowRankBranch()
            change.live.append(live)
        self.bias.add_to(change)
        return change

    def _blocks(self, down: torch.Tensor):
        """Fill ``down``, and give the blocks of up."""
        site, start = self.site, 0
        for placed in self.branch.placed:
            term, stop = placed.term, start + placed.term.rank
            fits(term.down, down.dtype, "lora_down", site.path, placed.part.file, placed.part.key)
            down[start:stop] = term.down.to(down.device)
            values, power = normalized(term.up, down.dtype)
            whole = values if len(values) == site.out else _at(values, placed.rows, site.out)
            values = site.stored(whole).to(down.dtype, copy=True).contiguous()
            scale = Scale(term.rank, term.scale * power, placed.lora)
            yield Block(values, (slice(None), slice(start, stop)), (scale,), str(placed.part.target))
            start = stop


def _at(values: torch.Tensor, rows: slice, out: int) -> torch.Tensor:
    whole = values.new_zeros(out, values.shape[1])
    whole[rows] = values
    return whole


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
