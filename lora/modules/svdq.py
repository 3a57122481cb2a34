"""SVDQW4A4Linear: terms are appended to proj_down and proj_up, in packed order, beside the packed base.

The same parameters under the names ``qkv_...`` are what NunchakuZImageFusedModule keeps of its qkv layer.
Forward hooks do not fire on layers that run through fused kernels; these two factors always count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from .. import dequantize, packing
from ..errors import PlanError
from ..packing import SIDE, fragments, padded
from .blocks import Block, Blocks, Scale, fits, normalized
from .budget import squeeze
from .change import Change, parameter_like
from .placed import Placed, gather
from .site import Draft, Site, not_loaded
from .sums import bias_sum

#: Ranks that the kernels take in all; beyond it they compute garbage without an error.
MAX_RANK = 1024


class SVDQSite(Site):
    """Factors packed as packing.py says, bias packed too, rows of the weight in natural order."""

    kind = "svdq"

    def __init__(self, path: str, owner: nn.Module, prefix: str = ""):
        self.prefix = prefix
        down, up = getattr(owner, prefix + "proj_down"), getattr(owner, prefix + "proj_up")
        if down is None or up is None or down.is_meta or up.is_meta:
            raise not_loaded(path)
        super().__init__(path, owner, up.shape[0], down.shape[0])

    def named(self, name: str):
        return self.bare(self.prefix + name)

    @property
    def has_bias(self) -> bool:
        return self.named("bias") is not None

    def weight(self):
        return dequantize.svdq(self)

    def bias(self):
        return packing.unpack_vector(self.named("bias").detach().float())

    def draft(self, parts, strengths, max_rank):
        return SVDQDraft(self, parts, strengths, max_rank)


class SVDQDraft(Draft):
    def __init__(self, site: SVDQSite, parts, strengths: Sequence[float], max_rank: int):
        self.site, self.strengths = site, strengths
        self.base_down, self.base_up = site.named("proj_down"), site.named("proj_up")
        base_rank, dtype = self.base_down.shape[1], self.base_down.dtype
        if base_rank % SIDE or site.out % SIDE or site.inp % SIDE or dtype not in (torch.float16, torch.bfloat16):
            raise PlanError("the low-rank branch is not one that nunchaku's kernels take", key=site.path,
                            expected="float16 or bfloat16, extents and rank that are multiples of 16",
                            found=f"{dtype}, {site.out} x {site.inp}, rank {base_rank}")
        branch = gather(site, parts, strengths, max_rank)
        self.groups = _groups(branch.placed)
        if _padded(self.groups) > MAX_RANK - base_rank:
            branch = squeeze(branch, site, strengths, MAX_RANK - base_rank - SIDE)
            self.groups = _groups(branch.placed)
        self.rank, self.lines, self.fixed = _padded(self.groups), branch.lines, branch.fixed
        self.bias = bias_sum(site, parts, strengths, packing.pack_vector)

    def build(self, rank=None):
        site, change = self.site, Change(self.site.owner, self.site.path, {}, fixed=self.fixed)
        rank = self.rank if rank is None else rank
        if rank:
            down, up, blocks = self._factors(rank)
            for name, factor in (("proj_down", down), ("proj_up", up)):
                change.values[site.prefix + name] = parameter_like(site.owner, site.prefix + name, factor)
            change.live.append(blocks)
            if "rank" in site.owner.__dict__:
                change.values["rank"] = down.shape[1]
        self.bias.add_to(change)
        return change

    def _factors(self, rank: int):
        """New proj_down and proj_up with ``rank`` appended ranks, and the blocks of the latter."""
        site, base_down, base_up = self.site, self.base_down.detach(), self.base_up.detach()
        dtype, device, first = base_down.dtype, base_down.device, base_down.shape[1] // SIDE
        end = first + rank // SIDE
        columns = [base_down.view(site.inp // SIDE, -1)]
        for group in self.groups:
            columns += [column.to(device) for column in _pack_down(site, group, dtype)]
        if self.rank < rank:
            columns.append(base_down.new_zeros(site.inp // SIDE, (rank - self.rank) * packing.SIDE))
        new_down = torch.cat(columns, dim=1).view(site.inp, end * SIDE)
        new_up = torch.empty(site.out, end * SIDE, dtype=dtype, device=device)
        view = fragments(new_up)
        view[:, :first].copy_(fragments(base_up))
        live = Blocks(site.prefix + "proj_up", site.path, fragments)
        live.fill(new_up, self._blocks(first, dtype), self.strengths)
        _clear_rest(view, live.blocks, first + self.rank // SIDE)
        return new_down, new_up, live

    def _blocks(self, at: int, dtype) -> Iterator[Block]:
        """The groups' blocks of up, from rank fragment ``at`` on."""
        for group in self.groups:
            yield (block := _pack_up(self.site, group, at, dtype))
            at = block.region[1].stop


def _whole(placed: Placed) -> bool:
    """Whether a term fills its fragments: it then needs none of the others' columns or rows."""
    return not (placed.term.rank % SIDE or placed.rows.start % SIDE or placed.rows.stop % SIDE)


def _groups(placed: list[Placed]) -> list[list[Placed]]:
    """Terms that share fragments: those that fill them stand alone, all others are put side by side."""
    groups, rest = [], []
    for one in placed:
        groups.append([one]) if _whole(one) else rest.append(one)
    return [*groups, rest] if rest else groups


def _padded(groups: list[list[Placed]]) -> int:
    return sum(padded(sum(one.term.rank for one in group)) for group in groups)


def _alone(group: list[Placed]) -> bool:
    return len(group) == 1 and _whole(group[0])


def _pack_down(site: SVDQSite, group: list[Placed], dtype) -> list[torch.Tensor]:
    """The packed columns of the group's down factors."""
    for one in group:
        fits(one.term.down, dtype, "lora_down", site.path, one.part.file, one.part.key)
    if _alone(group):
        return packing.pack_down(group[0].term.down, dtype)
    return packing.pack_down(torch.cat([one.term.down.to(dtype) for one in group]), dtype)


def _pack_up(site: SVDQSite, group: list[Placed], at: int, dtype) -> Block:
    """The group's block of up at rank fragment ``at``."""
    scaled = [normalized(one.term.up, dtype) for one in group]
    scales = tuple(Scale(one.term.rank, one.term.scale * power, one.lora) for one, (_, power) in zip(group, scaled))
    rows, ranks = slice(0, site.out // SIDE), None
    if _alone(group):
        (one,), ((up, _),) = group, scaled
        rows = slice(one.rows.start // SIDE, one.rows.stop // SIDE)
    else:
        up = _side_by_side(site, group, scaled, dtype)
        ranks = packing.ranks_of_up(padded(up.shape[1]))
    values = packing.pack_up(up, dtype)
    return Block(values, (rows, slice(at, at + values.shape[1])), scales, str(group[0].part.target), ranks)


def _side_by_side(site: SVDQSite, group: list[Placed], scaled, dtype) -> torch.Tensor:
    """The up factors of a group, each in its rows and in columns of its own."""
    up = torch.zeros(site.out, sum(one.term.rank for one in group), dtype=dtype, device=group[0].term.up.device)
    start = 0
    for one, (values, _) in zip(group, scaled):
        up[one.rows, start:start + one.term.rank] = values.to(dtype)
        start += one.term.rank
    return up


def _clear_rest(view, blocks: list[Block], end: int) -> None:
    """Zero what no block writes: the rows above and below each, and the padding behind all."""
    for block in blocks:
        rows, columns = block.region
        if rows.start:
            view[:rows.start, columns].zero_()
        if rows.stop < view.shape[0]:
            view[rows.stop:, columns].zero_()
    if end < view.shape[1]:
        view[:, end:].zero_()

