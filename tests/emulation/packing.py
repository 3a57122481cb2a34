"""The order in which nunchaku's kernels keep a low-rank factor and a bias, written as index formulas.

Independent of qpatch's packer and of nunchaku's: one formula gives, for every element in memory,
its place in the plain matrix.
"""

import functools

import torch

#: Place of each of 16 stored bias elements in the plain vector.
BIAS_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


@functools.cache
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


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Four-bit codes [out, in] (0 to 15) in the order of ``qweight`` of an SVDQuant layer: [out, in / 2] int8.

    out and in are multiples of 128 and 64. A 32-bit word holds eight neighbours along in, lowest first.
    """
    out, width = codes.shape
    word = torch.arange(out * width // 8)
    k_half, n_half, k_lane, n_lane, n_pack = word % 2, word // 2 % 2, word // 4 % 4, word // 16 % 8, word // 128 % 8
    k_tile, n_tile = word // 1024 % (width // 64), word // 1024 // (width // 64)
    rows = n_tile * 128 + n_pack * 16 + n_half * 8 + n_lane
    columns = (k_tile * 64 + k_half * 32 + k_lane * 8)[:, None] + torch.arange(8)
    nibbles = codes[rows[:, None], columns].to(torch.int64)
    words = (nibbles << torch.arange(0, 32, 4)).sum(-1)
    # As a signed word: the highest nibble may set the sign.
    words = torch.where(words >= 2 ** 31, words - 2 ** 32, words).to(torch.int32)
    return words.view(torch.int8).view(out, width // 2)


def pack_group_scales(scales: torch.Tensor) -> torch.Tensor:
    """int4 scales [out, groups] in the order of ``wscales`` [groups, out]: by 128 rows, each in a bias' order."""
    tiles = scales.unflatten(0, (-1, 128)).transpose(1, 2)
    ordered = tiles.unflatten(-1, (-1, 16))[..., list(BIAS_ORDER)]
    return ordered.reshape(scales.shape[1], scales.shape[0])


def pack_micro_scales(scales: torch.Tensor) -> torch.Tensor:
    """nvfp4 scales [out, in / 16] in the order of ``wscales`` [in / 16, out]."""
    out, groups = scales.shape
    place = torch.arange(out * groups)
    group, quarter, eighth, lane = place % 4, place // 4 % 4, place // 16 % 4, place // 64 % 8
    k_tile, n_tile = place // 512 % (groups // 4), place // 512 // (groups // 4)
    return scales[n_tile * 128 + quarter * 32 + eighth * 8 + lane, k_tile * 4 + group].reshape(groups, out)


def pack_awq_codes(codes: torch.Tensor) -> torch.Tensor:
    """Four-bit codes [out, in] in the order of ``qweight`` of an AWQ layer: [out / 4, in / 2] int32.

    A 16-bit word holds the inputs j, j + 8, j + 16, j + 24 of a run of 32; four rows alternate by 64 inputs.
    """
    out, width = codes.shape
    word = torch.arange(out * width // 4)
    j, run, row = word % 8, word // 8 % 2, word // 16 % 4
    tile, block = word // 64 % (width // 64), word // 64 // (width // 64)
    columns = (tile * 64 + run * 32 + j)[:, None] + torch.arange(0, 32, 8)
    words = (codes[(block * 4 + row)[:, None], columns].to(torch.int64) << torch.arange(0, 16, 4)).sum(-1)
    words = torch.where(words >= 2 ** 15, words - 2 ** 16, words).to(torch.int16)
    return words.view(torch.int32).view(out // 4, width // 2)
