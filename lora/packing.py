"""Nunchaku's packed order of low-rank factors and biases.

A factor of rank R over C channels is stored as fragments of 16 channels by 16 ranks: memory is
(C/16, R/16, 256), for ``down`` [R, C] and ``up`` [C, R] alike, so more rank is more fragments along
the second axis and what is there stays packed. Inside a fragment the matrix of n rows and k columns
(down: n is the rank, up: n is the channel) lies as (n-lane 8, k-lane 4, n-pack 2, k-pack 2, k-element 2)
with n = n-pack * 8 + n-lane and k = k-pack * 8 + k-lane * 2 + k-element.

The order of ranks is free as long as both factors agree. We choose it for ``up``, so that four consecutive
ranks are one 64-bit lane of the kernel, and the lanes of one fragment are evenly apart in the plain factor:
packing ``up`` is then one interleaving copy of its upper and lower eight channels. ``down`` takes its ranks in
the same order, by one gather a fragment column over lanes of 32 bits (two channels).
"""

from __future__ import annotations

from functools import lru_cache

import torch

#: Channels of a fragment, and ranks of a fragment.
SIDE = 16
#: Elements of a fragment.
SIZE = SIDE * SIDE

#: Stored position -> place in each 16 of a packed bias.
_BIAS_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


def padded(rank: int) -> int:
    """``rank`` rounded up to whole fragments."""
    return -(-rank // SIDE) * SIDE


def fragments(factor: torch.Tensor) -> torch.Tensor:
    """A packed factor [channels, rank] as a view (channels / 16, rank / 16, 256)."""
    channels, rank = factor.shape
    return factor.view(channels // SIDE, rank // SIDE, SIZE)


def pack_down(down: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """The packed fragment columns [in / 16, 256] of ``down`` [rank, in], padded with zero ranks to whole fragments.

    ``dtype`` is the 16-bit type of the result; ``in`` is a multiple of 16.
    """
    rank, channels = down.shape
    if down.dtype != dtype:
        down = down.to(dtype)
    if rank % SIDE:
        down = torch.cat((down, down.new_zeros(padded(rank) - rank, channels)))
        rank = padded(rank)
    index, lanes = _down_index(rank, channels, down.device), _lanes(down, torch.int32)
    # Each fragment begins four ranks behind the one before it.
    starts = range(0, 4 * channels // 2 * (rank // SIDE), 4 * channels // 2)
    return [lanes[start:].index_select(0, index).view(dtype).view(channels // SIDE, SIZE) for start in starts]


def pack_up(up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``up`` [out, rank] packed: (out / 16, padded(rank) / 16, 256) in the 16-bit ``dtype``.

    ``out`` is a multiple of 16.
    """
    channels, rank = up.shape
    if up.dtype != dtype:
        up = up.to(dtype)
    if rank % SIDE:
        up = torch.cat((up, up.new_zeros(channels, padded(rank) - rank)), dim=1)
        rank = padded(rank)
    upper, lower = _lanes(up, torch.int64).view(channels // SIDE, 2, 32, rank // SIDE).transpose(2, 3).unbind(1)
    return torch.stack((upper, lower), dim=3).view(dtype).view(channels // SIDE, rank // SIDE, SIZE)


def ranks_of_up(ranks: int) -> torch.Tensor:
    """Which rank each element of an ``up`` fragment row, as :func:`pack_up` lays it, belongs to: (ranks / 16, 256)."""
    columns = torch.arange(ranks, dtype=torch.int16).expand(SIDE, ranks)
    return pack_up(columns, torch.int16)[0].long()


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
def _down_index(rank: int, channels: int, device: torch.device) -> torch.Tensor:
    """Lane of ``down`` [rank, channels] that stands at each place of the first packed fragment column."""
    # As up's k the rank is (k-lane 4, fragment, k-pack 2, element 2); as down's n (n-pack = k-pack, n-lane = k-lane,
    # element).
    lanes = torch.arange(rank * channels // 2, dtype=torch.int32).view(4, -1, 2, 2, channels // SIDE, 2, 4)[:, 0]
    return lanes.permute(3, 0, 2, 5, 1, 4).reshape(-1).to(device)
