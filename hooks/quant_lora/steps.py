"""The step sizes of the quantized formats, read from a sample of a weight's codes and from its scales.

A rotation does not change them: the delta is rotated with the weight and keeps its rms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from . import weights

#: Codes that are looked at: enough for a mean within two percent.
_SAMPLE = 1 << 14

#: E2M1, by the three magnitude bits (values 0, 0.5, 1, 1.5, 2, 3, 4, 6): mean square of the steps below and above.
_E2M1 = (0.25, 0.25, 0.25, 0.25, 0.625, 1.0, 2.5, 4.0)


@dataclass(frozen=True)
class Steps:
    """``rms``: root mean square of the distance between neighbouring values, in units of the weight.

    ``on_grid``: whether requantizing an unchanged weight gives the same weight. ComfyUI's NVFP4 does not:
    its stochastic rounding draws the block scales anew.
    """

    rms: float
    on_grid: bool = True


def of(tensor) -> Steps | None:
    """The steps of a QuantizedTensor; infinite where its layout can only be made offline; None if it is not known."""
    layout = weights.layout(tensor)
    if layout in _OFFLINE:
        return Steps(math.inf)
    squared = _SQUARED.get(layout)
    if squared is None:
        return None
    return Steps(math.sqrt(squared(tensor._qdata, tensor._params)), on_grid=layout != "TensorCoreNVFP4Layout")


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    # An odd stride, or it would stay in a few columns.
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE) | 1]


def _mean_square(scale: torch.Tensor) -> float:
    """Of the scales that are in use: padding has scale 0."""
    values = _sample(scale).float()
    used = values[values > 0]
    return used.square().mean().item() if used.numel() else 0.0


def _int8(qdata, params) -> float:
    return _mean_square(params.scale)


def _nibbles(qdata: torch.Tensor) -> torch.Tensor:
    packed = _sample(qdata.view(torch.uint8)).long()
    return torch.cat((packed & 15, packed >> 4))


def _nvfp4(qdata, params) -> float:
    table = torch.tensor(_E2M1, device=qdata.device)
    return table[_nibbles(qdata) & 7].mean().item() * _mean_square(params.block_scale) * params.scale.item() ** 2


def _float8(qdata, params) -> float:
    info = torch.finfo(qdata.dtype)
    exponent = torch.frexp(_sample(qdata).float().abs().clamp_min(info.smallest_normal)).exponent - 1
    return (2.0 ** (exponent * 2)).mean().item() * info.eps**2 * _mean_square(params.scale)


def _int4(qdata, params) -> float:
    return _mean_square(params.scale)


def _w4a8(qdata, params) -> float:
    channels = _mean_square(params.s_channel) if params.s_channel is not None else 1.0
    levels = 1.0 if params.codebook is None else _between(params.codebook.float(), _nibbles(qdata))
    return levels * _mean_square(params.scale) * channels


def _between(codebook: torch.Tensor, codes: torch.Tensor) -> float:
    """Mean square distance to the next level below and above, for the levels that ``codes`` name."""
    gaps = codebook.sort().values.diff().square()
    both = torch.cat((gaps[:1], (gaps[1:] + gaps[:-1]) / 2, gaps[-1:]))
    return both[codes].mean().item()


_SQUARED = {
    "TensorWiseINT8Layout": _int8,
    "TensorCoreNVFP4Layout": _nvfp4,
    "TensorCoreMXFP8Layout": _float8,
    "TensorCoreFP8Layout": _float8,
    "TensorCoreFP8E4M3Layout": _float8,
    "TensorCoreFP8E5M2Layout": _float8,
    "TensorCoreConvRotW4A4Layout": _int4,
    "AsymW4A8Int8Layout": _w4a8,
}
_OFFLINE = ("TensorCoreSVDQuantW4A4Layout", "TensorCoreAWQW4A16Layout")
