"""nunchaku's compiled functions in float, so that its layers run on a CPU.

Same names, argument order and in-place outputs as ``nunchaku._C.ops``. What cannot be had from 4-bit
storage is kept beside it: the residual weight of a layer under the first bytes of its ``qweight`` (so
that a copy of the parameter, in an offload buffer or on another device, still finds it), the
activation between two calls under a number in the "quantized" activation. The low-rank branch and
the bias are computed from the packed parameters that the caller passes.
"""

import itertools

import torch
import torch.nn.functional as F

from .packing import unpack, unpack_bias

#: What the fused GELU adds before it quantizes to unsigned int4.
SHIFT = 0.171875

_numbers = itertools.count(1)
_weights: dict[bytes, torch.Tensor] = {}
_activations: dict[int, torch.Tensor] = {}


def _first_bytes(carrier: torch.Tensor, count: int) -> torch.Tensor:
    return carrier.detach().reshape(-1).view(torch.uint8)[:count]


def keep_weight(qweight: torch.Tensor, residual: torch.Tensor) -> None:
    """Let the layer of ``qweight`` have ``residual`` [out, in], any float dtype, as its quantized part."""
    _weights[bytes(_first_bytes(qweight, 32).tolist())] = residual


def residual_of(qweight: torch.Tensor) -> torch.Tensor:
    """The residual weight [out, in] that :func:`keep_weight` put behind ``qweight``."""
    return _weights[bytes(_first_bytes(qweight, 32).tolist())]


def _hand_over(carrier: torch.Tensor, activation: torch.Tensor) -> None:
    number = next(_numbers)
    _activations[number] = activation
    _first_bytes(carrier, 8).copy_(torch.tensor([number]).view(torch.uint8))


def _take(carrier: torch.Tensor) -> torch.Tensor:
    return _activations.pop(int(_first_bytes(carrier, 8).clone().view(torch.int64)))


def _low_rank_input(x: torch.Tensor, lora_down: torch.Tensor, out: torch.Tensor) -> None:
    assert lora_down.shape[1] == out.shape[1], "the kernel's buffer has another rank than proj_down"
    assert lora_down.shape[1] <= 1024, "the kernels take a total rank of at most 1024"
    out.zero_()
    out[: x.shape[0]] = x.float() @ unpack(lora_down, down=True).float().T


# To torch.compile the real ones are foreign code that it cannot look into.
@torch.compiler.disable
def quantize_w4a4_act_fuse_lora(input, output, oscales, lora_down, lora_act_out, smooth, fuse_glu, fp4):
    """Note the activation [M, in] under ``output``, and compute the low-rank hidden states from it."""
    assert not fuse_glu
    _hand_over(output, input)
    _low_rank_input(input, lora_down, lora_act_out)


def _product(act, wgt, lora_act_in, lora_up, lora_scales, bias):
    x = _take(act)
    residual = residual_of(wgt)
    y = x.to(residual.dtype) @ residual.T
    hidden = lora_act_in[: x.shape[0]] * torch.tensor(lora_scales).repeat_interleave(16)[: lora_act_in.shape[1]]
    y = y + (hidden @ unpack(lora_up, down=False).float().T).to(y.dtype)
    return y if bias is None else y + unpack_bias(bias.detach()).to(y.dtype)


def _unpack_rotary(packed: torch.Tensor) -> torch.Tensor:
    """The packed rotary table [1, M, D] as (sin, cos) pairs [M, D/2, 2]."""
    _, rows, width = packed.shape
    table = packed.view(rows // 16, width // 8, 8, 4, 2, 2)
    # memory: (row block, column block, row lane 8, column lane 4, row pack 2, column element 2)
    plain = table.permute(0, 4, 2, 1, 3, 5)
    return plain.reshape(rows, width // 2, 2)


def _normalize_and_rotate(part: torch.Tensor, weight: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    heads = part.view(part.shape[0], -1, weight.numel())
    heads = F.rms_norm(heads.float(), (weight.numel(),), weight.float(), 1e-6)
    even, odd = heads[..., 0::2], heads[..., 1::2]
    sin, cos = pairs[: part.shape[0], None, :, 0], pairs[: part.shape[0], None, :, 1]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(2).view_as(part).to(part.dtype)


@torch.compiler.disable
def gemm_w4a4(act, wgt, out, qout, ascales, wscales, oscales, poolout, lora_act_in, lora_up, lora_down, lora_act_out,
              norm_q, norm_k, rotary_emb, bias, smooth_factor, out_vk, out_linearattn, act_unsigned, lora_scales,
              fuse_silu, fp4, alpha, wcscales, out_q, out_k, out_v, attn_tokens):
    """The plain product, or the one followed by q/k norm and rotary, or by GELU and the next quantization."""
    y = _product(act, wgt, lora_act_in, lora_up, lora_scales, bias)
    if qout is not None:
        hidden = F.gelu(y, approximate="tanh")
        # The next low-rank branch sees the value before the shift.
        _low_rank_input(hidden, lora_down, lora_act_out)
        _hand_over(qout, hidden if fp4 else hidden + SHIFT)
        return
    if norm_q is not None:
        pairs = _unpack_rotary(rotary_emb)
        assert pairs.shape[0] >= y.shape[0], "the rotary table has fewer rows than there are tokens"
        q, k, v = y.chunk(3, dim=-1)
        y = torch.cat((_normalize_and_rotate(q, norm_q, pairs), _normalize_and_rotate(k, norm_k, pairs), v), dim=-1)
    out.copy_(y.view_as(out))


@torch.compiler.disable
def gemv_awq(in_feats, kernel, scaling_factors, zeros, m, n, k, group_size):
    """[m, k] times the weight behind ``kernel``: [m, n]; the real one takes a batch of at most 8."""
    assert m <= 8
    residual = residual_of(kernel)
    return (in_feats.to(residual.dtype) @ residual.T).to(in_feats.dtype)
