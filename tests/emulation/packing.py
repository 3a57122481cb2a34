"""The order in which nunchaku's kernels keep a low-rank factor and a bias, written as index formulas.

Independent of qpatch's packer and of nunchaku's: one formula gives, for every element in memory,
its place in the plain matrix.
"""

import torch

#: Place of each of 16 stored bias elements in the plain vector.
BIAS_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


def _places(channels: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For element i of the memory of a [channels, rank] factor: channel fragment, rank fragment, n and k inside it."""
    i = torch.arange(channels * rank)
    element, k_pack, n_pack = i % 2, i // 2 % 2, i // 4 % 2
    k_lane, n_lane, fragment = i // 8 % 4, i // 32 % 8, i // 256
    fragments = rank // 16
    return fragment // fragments, fragment % fragments, n_pack * 8 + n_lane, k_pack * 8 + k_lane * 2 + element


def unpack(packed: torch.Tensor, down: bool) -> torch.Tensor:
    """A packed factor [channels, rank] as a plain one: [rank, channels] for down, [channels, rank] for up."""
    channels, rank = packed.shape
    fragment_c, fragment_r, n, k = _places(channels, rank)
    plain = torch.empty((rank, channels) if down else (channels, rank), dtype=packed.dtype)
    rows, columns = (fragment_r, fragment_c) if down else (fragment_c, fragment_r)
    plain[rows * 16 + n, columns * 16 + k] = packed.reshape(-1).cpu()
    return plain.to(packed.device)


def pack(plain: torch.Tensor, down: bool) -> torch.Tensor:
    """The inverse of :func:`unpack`; both sides of ``plain`` are multiples of 16."""
    rank, channels = plain.shape if down else plain.shape[::-1]
    fragment_c, fragment_r, n, k = _places(channels, rank)
    rows, columns = (fragment_r, fragment_c) if down else (fragment_c, fragment_r)
    return plain[rows * 16 + n, columns * 16 + k].reshape(channels, rank).contiguous()


def unpack_bias(packed: torch.Tensor) -> torch.Tensor:
    """A packed bias [out] in plain order; out is a multiple of 16."""
    plain = torch.empty_like(packed).view(-1, 16)
    plain[:, list(BIAS_ORDER)] = packed.view(-1, 16)
    return plain.view(-1)


def pack_bias(plain: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`unpack_bias`."""
    return plain.view(-1, 16)[:, list(BIAS_ORDER)].reshape(-1).contiguous()
