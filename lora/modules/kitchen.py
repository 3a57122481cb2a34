"""Weights that ComfyUI keeps quantized: comfy_kitchen's QuantizedTensor, recognised by its parts.

A layout with a low-rank branch of its own (SVDQuant) gets the terms appended to it, in natural order.
One that can quantize gets a weight dequantized, changed and quantized again with its own options. One that
can only be made offline gets a branch beside its forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from ..errors import NonFiniteError
from ..packing import SIDE, padded
from .awq import BranchSite
from .blocks import Block, Blocks, Scale, fits, normalized
from .budget import squeeze
from .change import MARK, Change, Rewrite, original
from .placed import gather, line
from .plain import kept
from .site import Draft, Site
from .sums import Sum, bias_sum, weight_sum
from .svdq import MAX_RANK


def quantized(weight):
    """The QuantizedTensor that ``weight`` is or wraps (it depends on the version), else None."""
    for candidate in (weight, getattr(weight, "data", None)):
        if all(hasattr(candidate, name) for name in ("_qdata", "_layout_cls", "_params")):
            return candidate
    return None


class KitchenSite(Site):
    kind = "quantized"

    def __init__(self, path: str, owner: nn.Module):
        out, inp = quantized(owner.weight)._params.orig_shape
        super().__init__(path, owner, out, inp)

    def tensor(self):
        return quantized(self.bare("weight"))

    @property
    def has_bias(self):
        return isinstance(self.bare("bias"), torch.Tensor)

    def weight(self):
        return self.tensor().dequantize().float()

    def bias(self):
        return self.bare("bias").detach().float()

    def draft(self, parts, strengths, max_rank):
        return RequantizedDraft(self, parts, strengths)


@dataclasses.dataclass(eq=False)
class Requantized(Sum):
    """A quantized weight as its original plus addends, quantized again like the original."""

    def value(self, base, strengths):
        tensor = quantized(base)
        if not self.active(strengths):
            return tensor
        before = tensor.dequantize()
        result = before.float() + self.delta(before, strengths)
        if not torch.isfinite(result.to(before.dtype)).all():
            raise NonFiniteError(f"the weight with these LoRAs does not fit {before.dtype}", key=self.path)
        return requantize(tensor, result.to(before.dtype))

    def prepare(self, owner, before, strengths, changed):
        if not any(addend.lora in changed for addend in self.addends):
            return None
        change = next(change for change in owner.__dict__[MARK] if self in change.live)
        value = nn.Parameter(self.value(original(owner, self.name), strengths), requires_grad=False)
        old = owner._parameters[self.name]

        def put(parameter):
            # A wrapper subclass takes no new .data in every version: the Parameter itself is replaced.
            change.values[self.name] = owner._parameters[self.name] = parameter

        return Rewrite(lambda: put(value), lambda: put(old))


def requantize(like, weight: torch.Tensor):
    """``weight`` quantized with the layout and options of the QuantizedTensor ``like``."""
    if hasattr(like, "requantize_from_float"):
        return like.requantize_from_float(weight)
    return type(like).from_float(weight, like._layout_cls)


class RequantizedDraft(Draft):
    def __init__(self, site: KitchenSite, parts, strengths: Sequence[float]):
        self.site, self.strengths = site, strengths
        found = weight_sum(site, parts, strengths)
        self.addends, self.fixed = found.addends, found.fixed
        self.bias = bias_sum(site, parts, strengths)
        self.lines = [line(site, part, part.rank) for part, addends in found.parts if addends]

    def build(self, rank=None):
        site, change = self.site, Change(self.site.owner, self.site.path, {}, fixed=self.fixed)
        if self.addends:
            live = Requantized("weight", site.path, self.addends)
            value = live.value(site.tensor(), self.strengths)
            change.values["weight"] = nn.Parameter(value, requires_grad=False)
            change.live.append(live)
            self._measure(live, value)
        self.bias.add_to(change)
        return change

    def _measure(self, live: Requantized, value) -> None:
        before = self.site.weight()
        share = kept(live.delta(before, self.strengths), value.dequantize().float() - before)
        self.lines = [dataclasses.replace(one, kept=share) for one in self.lines]


class KitchenBranchSite(BranchSite):
    """A layout that can only be quantized offline (AWQ): rows as in the original layer, a branch beside the forward."""

    kind = "quantized, with a branch"

    def __init__(self, path: str, owner: nn.Module):
        tensor = quantized(owner.weight)
        super().__init__(path, owner, *tensor._params.orig_shape)

    @property
    def like(self):
        return quantized(self.owner.weight)

    def weight(self):
        return quantized(self.bare("weight")).dequantize().float()


class KitchenSVDQSite(KitchenSite):
    """proj_down [in, r] and proj_up [out, r] of the layout are in natural order, or up in tiles of 128 rows."""

    kind = "svdq (ComfyUI)"

    def draft(self, parts, strengths, max_rank):
        return KitchenSVDQDraft(self, parts, strengths, max_rank)


class KitchenSVDQDraft(Draft):
    def __init__(self, site: KitchenSVDQSite, parts, strengths: Sequence[float], max_rank: int):
        self.site, self.strengths = site, strengths
        self.branch = gather(site, parts, strengths, max_rank)
        room = MAX_RANK - site.tensor()._params.proj_down.shape[1]
        if padded(self.branch.ranks) > room:
            self.branch = squeeze(self.branch, site, strengths, room - SIDE)
        self.bias = bias_sum(site, parts, strengths)
        self.lines = self.branch.lines
        self.rank = padded(self.branch.ranks)

    def build(self, rank=None):
        site, change = self.site, Change(self.site.owner, self.site.path, {}, fixed=self.branch.fixed)
        rank = self.rank if rank is None else rank
        if rank:
            tensor = site.tensor()
            down, up, live = self._factors(tensor._params, rank)
            params = dataclasses.replace(tensor._params, proj_down=down, proj_up=up)
            changed = type(tensor)(tensor._qdata, tensor._layout_cls, params)
            change.values["weight"] = nn.Parameter(changed, requires_grad=False)
            # A Parameter is made of copies of the layout's tensors.
            live.address = quantized(change.values["weight"])._params.proj_up.data_ptr()
            change.live.append(live)
        self.bias.add_to(change)
        return change

    def _factors(self, params, rank: int):
        site, first = self.site, params.proj_down.shape[1]
        view = _tiled if params.proj_up.dim() == 3 else _natural
        down = torch.cat((params.proj_down.detach(), params.proj_down.new_zeros(site.inp, rank)), dim=1)
        up = params.proj_up.detach()
        up = torch.cat((up, up.new_zeros(*up.shape[:1], *((rank, up.shape[2]) if up.dim() == 3 else (rank,)))), dim=1)
        blocks, start = [], first
        for placed in self.branch.placed:
            stop = start + placed.term.rank
            fits(placed.term.down, down.dtype, "lora_down", site.path, placed.part.file, placed.part.key)
            down[:, start:stop] = placed.term.down.to(down.device, down.dtype).t()
            blocks.append(_block(site, placed, up, slice(start, stop)))
            start = stop
        live = Blocks("weight", site.path, view, tensor_of=_up_of)
        live.fill(up, blocks, self.strengths)
        return down, up, live


def _block(site, placed, up: torch.Tensor, ranks: slice) -> Block:
    values, power = normalized(placed.term.up, up.dtype)
    scales = (Scale(placed.term.rank, placed.term.scale * power, placed.lora),)
    if up.dim() == 2:
        return Block(values.to(up.dtype, copy=True), (placed.rows, ranks), scales, str(placed.part.target))
    whole = torch.zeros(site.out, placed.term.rank, dtype=up.dtype, device=values.device)
    whole[placed.rows] = values.to(up.dtype)
    tiles = whole.unflatten(0, (-1, up.shape[2]))
    return Block(tiles, (slice(None), slice(None), ranks), scales, str(placed.part.target))


def _natural(up: torch.Tensor) -> torch.Tensor:
    return up


def _tiled(up: torch.Tensor) -> torch.Tensor:
    """(out / 128, r, 128) as (out / 128, 128, r)."""
    return up.transpose(1, 2)


def _up_of(owner: nn.Module, name: str) -> torch.Tensor:
    return quantized(owner._parameters[name])._params.proj_up
