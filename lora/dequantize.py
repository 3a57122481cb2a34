"""The float weight that a nunchaku layer stands for, rebuilt from what is stored.

Only adapters that depend on the base weight need it (DoRA, OFT, ``set_weight`` on a quantized layer).
The layouts are those that DeepCompressor's exporter writes and nunchaku's kernels read.
"""

from __future__ import annotations

import torch

from .errors import UnsupportedAdapter
from .packing import unpack, unpack_vector

#: Values of the four-bit float E2M1, by code.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

#: Rows of a weight that one warp holds: the unit in which codes and scales are stored.
_WARP = 128


def svdq(site) -> torch.Tensor:
    """The weight of an SVDQW4A4Linear, [out, in] float32: dequantized residual / smooth + up @ down.

    ``site.named(name)`` gives the stored tensors. The kernel divides the activation by the smoothing factor, and
    runs the low-rank branch on the activation as it comes.
    """
    qweight, wscales = site.named("qweight"), site.named("wscales")
    out, inp = site.out, site.inp
    if out % _WARP or inp % _WARP or tuple(qweight.shape) != (out, inp // 2):
        raise UnsupportedAdapter("the base weight cannot be rebuilt: its packed shape is unknown", key=site.path,
                                 expected=f"[{out}, {inp // 2}]", found=list(qweight.shape))
    codes = svdq_codes(qweight, out, inp)
    if wscales.dtype == torch.float8_e4m3fn:
        weight = torch.tensor(_E2M1, device=codes.device)[codes.long()] * _expand(_micro_scales(wscales, out, inp), inp)
        weight *= _channel_scales(site)
    else:
        weight = ((codes ^ 8) - 8).float() * _expand(_group_scales(wscales, out), inp)
    weight /= unpack_vector(site.named("smooth_factor").detach().float())
    down, up = site.named("proj_down").detach(), site.named("proj_up").detach()
    return weight.addmm_(unpack(up, False).float(), unpack(down, True).float())


def svdq_codes(qweight: torch.Tensor, out: int, inp: int) -> torch.Tensor:
    """The four-bit codes 0 to 15 of a packed ``qweight`` [out, in / 2] int8, as [out, in] int32 in plain order.

    Memory is (out / 128, in / 64, n-pack 8, n-lane 8, k-lane 4, n-half 2, k-half 2) words of eight codes.
    """
    words = qweight.detach().contiguous().view(torch.int32).view(out // _WARP, inp // 64, 8, 8, 4, 2, 2, 1)
    codes = (words >> torch.arange(0, 32, 4, dtype=torch.int32, device=qweight.device)) & 15
    return codes.permute(0, 2, 5, 3, 1, 6, 4, 7).reshape(out, inp)


def _group_scales(wscales: torch.Tensor, out: int) -> torch.Tensor:
    """int4: memory (out / 128, in / 64, 128), the last in the order of a packed bias; -> [out, in / 64] float32."""
    stored = wscales.detach().float().reshape(out // _WARP, -1, _WARP)
    plain = unpack_vector(stored.reshape(-1)).view(out // _WARP, -1, _WARP)
    return plain.transpose(1, 2).reshape(out, -1)


def _micro_scales(wscales: torch.Tensor, out: int, inp: int) -> torch.Tensor:
    """nvfp4: memory (out / 128, in / 64, 8, 4, 4, 4 groups of 16); -> [out, in / 16] float32."""
    stored = wscales.detach().float().reshape(out // _WARP, inp // 64, 8, 4, 4, 4)
    return stored.permute(0, 4, 3, 2, 1, 5).reshape(out, inp // 16)


def _channel_scales(site) -> torch.Tensor:
    """nvfp4: the scale of each row, times that of the whole tensor; [out, 1] or a number."""
    tensor_scale = getattr(site.owner, site.prefix + "wtscale", None)
    scale = float(tensor_scale) if tensor_scale is not None else 1.0
    channels = site.named("wcscales")
    return scale if channels is None else unpack_vector(channels.detach().float())[:, None] * scale


def _expand(scales: torch.Tensor, inp: int) -> torch.Tensor:
    return scales.repeat_interleave(inp // scales.shape[1], dim=1)


def awq(qweight: torch.Tensor, wscales: torch.Tensor, wzeros: torch.Tensor, out: int, inp: int) -> torch.Tensor:
    """The weight of an AWQW4A16Linear, [out, in] float32: code * scale + zero, rows as they are stored.

    ``qweight`` is int32 [out / 4, in / 2], that is 16-bit words (out / 4, in / 64, 4, 2, 8): nibble t of word j
    of a run of 32 inputs is input 8 t + j. ``wscales`` and ``wzeros`` are [groups, out]; zero is scaled already.
    """
    words = qweight.detach().contiguous().view(torch.int16).view(out // 4, inp // 64, 4, 2, 1, 8).to(torch.int32)
    codes = (words >> torch.arange(0, 16, 4, dtype=torch.int32, device=qweight.device).view(4, 1)) & 15
    codes = codes.permute(0, 2, 1, 3, 4, 5).reshape(out, inp).float()
    groups = _live_groups(wscales)
    scales, zeros = (table.detach()[:groups].float().t() for table in (wscales, wzeros))
    return codes * _expand(scales, inp) + _expand(zeros, inp)


def _live_groups(wscales: torch.Tensor) -> int:
    """How many rows of scales are in use: the exporter pads the table with zeros."""
    used = (wscales.detach() != 0).any(dim=1)
    return int(used.nonzero().max()) + 1 if used.any() else len(wscales)
