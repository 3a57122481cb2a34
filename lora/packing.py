"""Nunchaku's packed order of low-rank factors and biases.

A factor of rank R over C channels is stored as fragments of 16 channels by 16 ranks: memory is
(C/16, R/16, 256), for ``down`` [R, C] and ``up`` [C, R] alike, so more rank is more fragments along
the second axis and what is there stays packed. Inside a fragment the matrix of n rows and k columns
(down: n is the rank, up: n is the channel) lies as (n-lane 8, k-lane 4, n-pack 2, k-pack 2, k-element 2)
with n = n-pack * 8 + n-lane and k = k-pack * 8 + k-lane * 2 + k-element.

Packing is one gather a fragment column, over lanes of several elements: 32 bits (two channels) for
``down``, 64 bits for ``up``. The latter is possible because the order of ranks inside a fragment is
free as long as both factors agree: we put four consecutive ranks where the kernel reads one lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch

#: Channels of a fragment, and ranks of a fragment.
SIDE = 16
#: Elements of a fragment.
SIZE = SIDE * SIDE

#: Lanes gathered at a time: index, source and result of a block then stay in a core's own cache.
_BLOCK = 1 << 15

#: Stored position -> place in each 16 of a packed bias.
_BIAS_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


def padded(rank: int) -> int:
    """``rank`` rounded up to whole fragments."""
    return -(-rank // SIDE) * SIDE


def fragments(factor: torch.Tensor) -> torch.Tensor:
    """A packed factor [channels, rank] as a view (channels / 16, rank / 16, 256)."""
    channels, rank = factor.shape
    return factor.view(channels // SIDE, rank // SIDE, SIZE)


def pack_down(down: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The packed fragment columns [in / 16, 256] of ``down`` [rank, in], 16 ranks each, the last padded with zeros.

    ``dtype`` is the 16-bit type of the result; ``in`` is a multiple of 16.
    """
    rank, channels = down.shape
    down = down.to(dtype)
    if rank % SIDE:
        down = torch.cat((down, down.new_zeros(padded(rank) - rank, channels)))
    index, lanes = _down_index(channels, down.device), _lanes(down, torch.int32)
    for part in lanes.split(SIDE * channels // 2) if rank > SIDE else (lanes,):
        yield torch.index_select(part, 0, index).view(channels // SIDE, SIZE // 2).view(dtype)


def pack_up(up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``up`` [out, rank] packed: (out / 16, padded(rank) / 16, 256) in the 16-bit ``dtype``.

    ``out`` is a multiple of 16.
    """
    channels, rank = up.shape
    up = up.to(dtype)
    if rank % SIDE:
        up = torch.cat((up, up.new_zeros(channels, padded(rank) - rank)), dim=1)
        rank = padded(rank)
    source, index = _lanes(up, torch.int64), _up_index(rank, up.device)
    result = torch.empty_like(source)
    for lanes, packed in zip(source.split(len(index)), result.split(len(index))):
        torch.index_select(lanes, 0, index if len(lanes) == len(index) else index[:len(lanes)], out=packed)
    return result.view(dtype).view(channels // SIDE, rank // SIDE, SIZE)


def ranks_of_up(ranks: int) -> torch.Tensor:
    """Which rank each element of an ``up`` fragment row, as :func:`pack_up` lays it, belongs to: (ranks / 16, 256)."""
    columns = torch.arange(ranks).view(1, ranks).expand(SIDE, ranks).contiguous()
    order = torch.arange(SIDE * ranks // 4).view(2, 8, ranks // SIDE, 4).permute(2, 1, 3, 0).reshape(-1)
    return columns.view(-1, 4)[order].view(ranks // SIDE, SIZE)


def unpack(factor: torch.Tensor, down: bool) -> torch.Tensor:
    """A packed factor [channels, rank] as a plain one: ``down`` [rank, in] or ``up`` [out, rank], the same dtype."""
    channels, rank = factor.shape
    lanes = factor.view(channels // SIDE, rank // SIDE, 8, 4, 2, 2, 2)
    if down:
        return lanes.permute(1, 4, 2, 0, 5, 3, 6).reshape(rank, channels)
    return lanes.permute(0, 4, 2, 1, 5, 3, 6).reshape(channels, rank)


def pack_vector(plain: torch.Tensor) -> torch.Tensor:
    """A bias or per-channel scale [n] in the order that the kernels store it; n is a multiple of 16."""
    return plain.view(-1, SIDE)[:, list(_BIAS_ORDER)].reshape(-1)


def unpack_vector(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack_vector`."""
    plain = torch.empty_like(packed).view(-1, SIDE)
    plain[:, list(_BIAS_ORDER)] = packed.view(-1, SIDE)
    return plain.view(-1)


def _lanes(factor: torch.Tensor, lane: torch.dtype) -> torch.Tensor:
    """The memory of a contiguous 16-bit matrix as one row of wider lanes."""
    factor = factor.contiguous().view(-1)
    if factor.storage_offset() % (lane.itemsize // factor.itemsize):
        # A tensor of a file may begin between two lanes.
        factor = factor.clone()
    return factor.view(lane)


@lru_cache(maxsize=32)
def _down_index(channels: int, device: torch.device) -> torch.Tensor:
    """Lane of 16 rows [16, channels] (two channels a lane) that stands at each place of the packed fragments."""
    # rank = (k-lane 4, k-pack 2, element 2) of up; as down's n that is (n-pack = k-pack, n-lane = k-lane, element).
    lanes = torch.arange(SIDE * channels // 2, dtype=torch.int32).view(4, 2, 2, channels // SIDE, 2, 4)
    return lanes.permute(3, 0, 2, 5, 1, 4).reshape(-1).to(device)


def _block(rank: int) -> int:
    """Lanes of as many whole channel fragments of an ``up`` of ``rank`` as are gathered at a time."""
    fragment = SIDE * rank // 4
    return fragment * max(1, _BLOCK // fragment)


@lru_cache(maxsize=32)
def _up_index(rank: int, device: torch.device) -> torch.Tensor:
    """The same for one block of an ``up`` [channels, rank], four ranks a lane."""
    lanes = torch.arange(_block(rank), dtype=torch.int32).view(-1, 2, 8, rank // SIDE, 4)
    return lanes.permute(0, 3, 2, 4, 1).reshape(-1).to(device)
