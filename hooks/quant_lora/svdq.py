"""ComfyUI's native SVDQuant layout: the pair goes into the low-rank branch that the layout has."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from qpatch.lora.modules.svdq import MAX_RANK
from qpatch.lora.packing import padded

from .pair import Pair
from .weights import coarse, is_svdq

#: Attribute of a module: the rank of its own branch while a pair is appended to it.
_OWN_RANK = "qpatch_own_rank"


def fits(tensor, pair: Pair) -> bool:
    """Whether the kernel takes the layout's branch with ``pair`` appended: at most rank 1024, in steps of 16."""
    return is_svdq(tensor) and tensor._params.proj_down.shape[1] + padded(pair.rank) <= MAX_RANK


def appended(module: nn.Module) -> bool:
    """Whether the weight of ``module`` has more rank than its own: false again once ComfyUI has put its backup back."""
    own = vars(module).get(_OWN_RANK)
    tensor = coarse(module) if own is not None else None
    return tensor is not None and tensor._params.proj_down.shape[1] > own


def longer(tensor, pair: Pair):
    """A QuantizedTensor with the data of ``tensor`` and a branch of more rank; ``tensor`` is not written to."""
    params, more = tensor._params, padded(pair.rank)
    down = torch.cat((params.proj_down, params.proj_down.new_zeros(params.proj_down.shape[0], more)), dim=1)
    first = params.proj_down.shape[1]
    down[:, first:first + pair.rank] = pair.down.t().to(down.device, down.dtype)
    rows = pair.up.to(params.proj_up.device, params.proj_up.dtype)
    rows = torch.cat((rows, rows.new_zeros(rows.shape[0], more - pair.rank)), dim=1)
    if params.proj_up.dim() == 3:
        # (out / 128, rank, 128)
        rows = rows.unflatten(0, (-1, params.proj_up.shape[2])).transpose(1, 2)
    up = torch.cat((params.proj_up, rows), dim=1)
    return type(tensor)(tensor._qdata, tensor._layout_cls, dataclasses.replace(params, proj_down=down, proj_up=up))


def append(module: nn.Module, pair: Pair) -> None:
    """Put the longer weight in place. Whoever calls has left the original where ComfyUI restores it from."""
    tensor = coarse(module)
    setattr(module, _OWN_RANK, tensor._params.proj_down.shape[1])
    module.weight = nn.Parameter(longer(tensor, pair), requires_grad=False)


def forget(module: nn.Module) -> None:
    """The original weight stands again."""
    vars(module).pop(_OWN_RANK, None)
