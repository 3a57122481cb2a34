"""What the stored tensors of a quantized layer stand for, written as index formulas, float64.

Facts: the layout that DeepCompressor exports for nunchaku's kernels. Nothing is taken from the package under test.
"""

from __future__ import annotations

import torch
import trees

#: Values of the four-bit float E2M1 without the sign.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)

#: Place in each 16 values -> stored position.
_POSITION = torch.tensor([trees.BIAS_ORDER.index(place) for place in range(16)])


def _grid(out, inp):
    return torch.arange(out)[:, None].expand(out, inp), torch.arange(inp)[None, :].expand(out, inp)


def code_place(n, k, inp):
    """(word, shift) of the code of row n and column k in the words of a packed qweight."""
    word = (n // 128 * (inp // 64) + k // 64) * 8 + n % 128 // 16
    word = ((word * 8 + n % 8) * 4 + k % 32 // 8) * 4 + n % 16 // 8 * 2 + k % 64 // 32
    return word, 4 * (k % 8)


def group_scale_place(n, k, inp):
    """Place of the int4 scale of row n and column k in the memory of wscales."""
    return (n // 128 * (inp // 64) + k // 64) * 128 + n % 128 // 16 * 16 + _POSITION[n % 16]


def micro_scale_place(n, k, inp):
    """The same for the fp8 scales of nvfp4."""
    place = (n // 128 * (inp // 64) + k // 64) * 8 + n % 8
    return ((place * 4 + n % 32 // 8) * 4 + n % 128 // 32) * 4 + k % 64 // 16


def svdq_residual(layer) -> torch.Tensor:
    """The quantized part of an SVDQW4A4Linear, [out, in], as it acts on the input before smoothing."""
    out, inp = layer.out_features, layer.in_features
    n, k = _grid(out, inp)
    word, shift = code_place(n, k, inp)
    codes = (layer.qweight.view(torch.int32).flatten().long()[word] >> shift) & 15
    scales = layer.wscales.detach().double().flatten()
    if layer.precision == "int4":
        weight = torch.where(codes > 7, codes - 16, codes) * scales[group_scale_place(n, k, inp)]
    else:
        sign = torch.where(codes > 7, -1.0, 1.0).double()
        weight = sign * E2M1[codes % 8] * scales[micro_scale_place(n, k, inp)]
        weight = weight * trees.plain_bias(layer.wcscales)[:, None] * layer.wtscale
    return weight / trees.plain_bias(layer.smooth_factor)


def svdq_weight(layer) -> torch.Tensor:
    """The whole weight of an SVDQW4A4Linear, [out, in]."""
    return svdq_residual(layer) + trees.effective(layer)


def awq_weight(layer) -> torch.Tensor:
    """The weight of an AWQW4A16Linear, [out, in], rows as they are stored."""
    rows, columns = layer.qweight.shape
    out, inp = rows * 4, columns * 2
    n, k = _grid(out, inp)
    # Memory of 16-bit words: (out / 4, in / 64, row in four, run of 32 inputs, word); a word holds every eighth input.
    word = ((n // 4 * (inp // 64) + k // 64) * 4 + n % 4) * 16 + k % 64 // 32 * 8 + k % 8
    codes = (layer.qweight.view(torch.int16).flatten().long()[word] >> (4 * (k % 32 // 8))) & 15
    groups = k // (inp // len(layer.wscales))
    return codes * layer.wscales.detach().double()[groups, n] + layer.wzeros.detach().double()[groups, n]


def planar(rows: torch.Tensor, splits: int = 6) -> torch.Tensor:
    """Rows that a modulation layer stores as [dim, splits], in the order [splits, dim] of the original."""
    dim = len(rows) // splits
    return rows[torch.tensor([d * splits + j for j in range(splits) for d in range(dim)])]
