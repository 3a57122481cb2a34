"""SVDQW4A4Linear: terms are appended to proj_down and proj_up, in packed order, beside the packed base.

The same parameters under the names ``qkv_...`` are what NunchakuZImageFusedModule keeps of its qkv layer.
Forward hooks do not fire on layers that run through fused kernels; these two factors always count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .. import dequantize, packing
from ..errors import PlanError
from ..packing import SIDE, fragments, padded
from .blocks import Block, Blocks, Scale, fits, normalized
from .change import Change
from .placed import Branch, Placed, gather, squeeze
from .site import Draft, Site
from .sums import bias_sum

#: Ranks that the kernels take in all; beyond it they compute garbage without an error.
MAX_RANK = 1024


class SVDQSite(Site):
    """Factors packed as packing.py says, bias packed too, rows of the weight in natural order."""

    kind = "svdq"

    def __init__(self, path: str, owner: nn.Module, prefix: str = ""):
        self.prefix = prefix
        down, up = getattr(owner, prefix + "proj_down"), getattr(owner, prefix + "proj_up")
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
        base = site.named("proj_down")
        if base.shape[1] % SIDE or base.dtype not in (torch.float16, torch.bfloat16):
            raise PlanError("the low-rank branch is not one that nunchaku's kernels take", key=site.path,
                            expected="float16 or bfloat16, a rank that is a multiple of 16",
                            found=f"{base.dtype}, rank {base.shape[1]}")
        self.branch = gather(site, parts, strengths, max_rank)
        room = MAX_RANK - base.shape[1]
        if _appended(self.branch) > room:
            self.branch = squeeze(self.branch, site, strengths, room - SIDE)
        self.bias = bias_sum(site, parts, strengths, packing.pack_vector)
        self.lines = self.branch.lines
        self.rank = _appended(self.branch)

    def build(self, rank=None):
        site, change = self.site, Change(self.site.owner, self.site.path, {}, fixed=self.branch.fixed)
        rank = self.rank if rank is None else rank
        if rank:
            down, up, blocks = _factors(site, self.branch.placed, self.strengths, rank)
            change.values[site.prefix + "proj_down"], change.values[site.prefix + "proj_up"] = down, up
            change.live.append(blocks)
            if "rank" in site.owner.__dict__:
                change.values["rank"] = down.shape[1]
        self.bias.add_to(change)
        return change


def _whole(placed: Placed) -> bool:
    """Whether a term fills its fragments: it then needs none of the others' columns or rows."""
    return not (placed.term.rank % SIDE or placed.rows.start % SIDE or placed.rows.stop % SIDE)


def _appended(branch: Branch) -> int:
    whole = sum(placed.term.rank for placed in branch.placed if _whole(placed))
    return whole + padded(branch.ranks - whole)


def _factors(site: SVDQSite, placed: list[Placed], strengths, rank: int):
    """New proj_down and proj_up with ``rank`` appended ranks, and the blocks of the latter."""
    base_down, base_up = site.named("proj_down").detach(), site.named("proj_up").detach()
    dtype, device, first = base_down.dtype, base_down.device, base_down.shape[1] // SIDE
    columns, blocks, at = [base_down.view(site.inp // SIDE, -1)], [], first
    for group in _groups(placed):
        down, block = _pack(site, group, at, dtype)
        columns += [column.to(device) for column in down]
        blocks.append(block)
        at += len(down)
    if at < first + rank // SIDE:
        columns.append(base_down.new_zeros(site.inp // SIDE, (first + rank // SIDE - at) * packing.SIZE))
    new_down = torch.cat(columns, dim=1).view(site.inp, -1)
    new_up = torch.empty(site.out, new_down.shape[1], dtype=dtype, device=device)
    view = fragments(new_up)
    view[:, :first].copy_(fragments(base_up))
    _clear_rest(view, blocks, at)
    live = Blocks(site.prefix + "proj_up", site.path, blocks, fragments)
    live.write(new_up, strengths)
    return _parameter(site, "proj_down", new_down), _parameter(site, "proj_up", new_up), live


def _groups(placed: list[Placed]):
    """Terms that share fragments: those that fill them stand alone, all others are put side by side."""
    yield from ([one] for one in placed if _whole(one))
    rest = [one for one in placed if not _whole(one)]
    if rest:
        yield rest


def _pack(site: SVDQSite, group: list[Placed], at: int, dtype) -> tuple[list[torch.Tensor], Block]:
    """The packed columns of the group's down factors, and its block of up at rank fragment ``at``."""
    for one in group:
        fits(one.term.down, dtype, "lora_down", site.path, one.part.file, one.part.key)
    scaled = [normalized(one.term.up, dtype) for one in group]
    scales = tuple(Scale(one.term.rank, one.term.scale * power, one.lora) for one, (_, power) in zip(group, scaled))
    if len(group) == 1 and _whole(group[0]):
        (one,), ((up, _),), ranks = group, scaled, None
        down, rows = one.term.down, slice(one.rows.start // SIDE, one.rows.stop // SIDE)
    else:
        down = torch.cat([one.term.down.to(dtype) for one in group])
        up, rows = torch.zeros(site.out, len(down), dtype=dtype, device=down.device), slice(0, site.out // SIDE)
        start = 0
        for one, (values, _) in zip(group, scaled):
            up[one.rows, start:start + one.term.rank] = values.to(dtype)
            start += one.term.rank
        ranks = packing.ranks_of_up(padded(len(down)))
    columns = list(packing.pack_down(down, dtype))
    packed = packing.pack_up(up, dtype)
    block = Block(packed, (rows, slice(at, at + len(columns))), scales, str(group[0].part.target), ranks)
    return columns, block


def _clear_rest(view, blocks: list[Block], end: int) -> None:
    """Zero what no block writes: the rows above and below each, and the padding behind all."""
    for block in blocks:
        rows, columns = block.region
        if rows.start:
            view[:rows.start, columns].zero_()
        if rows.stop < len(view):
            view[rows.stop:, columns].zero_()
    if end < view.shape[1]:
        view[:, end:].zero_()


def _parameter(site: SVDQSite, name: str, value: torch.Tensor) -> nn.Parameter:
    before = site.named(name)
    if before.device.type == "cpu" and before.is_pinned():
        value = value.pin_memory()
    return nn.Parameter(value, requires_grad=getattr(site.owner, site.prefix + name).requires_grad)
