"""Quantize a tiny model: fill its Nunchaku layers from its unquantized twin, and give the twin what they then hold.

Works on any classes that keep nunchaku's contract: the real ones and the stand-ins.
"""

import torch

from . import kernels, packing

#: Strength of random weights: small enough that two blocks stay tame, large enough that a LoRA is seen.
SPREAD = 0.06
#: Values of the four-bit float E2M1, by code.
E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0))


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter of an unquantized model random float32 values; norms lie around one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator) * SPREAD
        value = 1 + noise if parameter.ndim == 1 and name.endswith("weight") else noise
        owner = model.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], torch.nn.Parameter(value, requires_grad=False))


def _int4(layer, weight: torch.Tensor) -> torch.Tensor:
    """Store ``weight`` [out, in] in ``layer``; what it stores, float32."""
    groups = weight.unflatten(1, (-1, 64))
    scales = (groups.abs().amax(-1) / 7).to(layer.wscales.dtype)
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7)
    layer.qweight.copy_(packing.pack_codes(codes.flatten(1).to(torch.int32) & 15))
    layer.wscales.copy_(packing.pack_group_scales(scales))
    return (codes * scales.float()[..., None]).flatten(1)


def _nvfp4(layer, weight: torch.Tensor) -> torch.Tensor:
    """The same for nvfp4; a scale for each row and one for the tensor keep the block scales in range."""
    layer.wtscale = float(weight.abs().max() / (6 * 448))
    channels = torch.ones(len(weight), dtype=layer.wcscales.dtype)
    groups = weight.unflatten(1, (-1, 16)) / layer.wtscale
    scales = (groups.abs().amax(-1) / 6).to(torch.float8_e4m3fn)
    distances = ((groups / scales.float().clamp(min=1e-9)[..., None]).unsqueeze(-1) - E2M1).abs()
    codes = distances.argmin(-1)
    layer.qweight.copy_(packing.pack_codes(codes.flatten(1)))
    layer.wscales.copy_(packing.pack_micro_scales(scales)), layer.wcscales.copy_(packing.pack_bias(channels))
    return (E2M1[codes] * scales.float()[..., None] * layer.wtscale).flatten(1)


@torch.no_grad()
def fill_svdq(layer, weight: torch.Tensor, bias: torch.Tensor | None, seed: int):
    """Store ``x @ weight.T + bias`` in an SVDQW4A4Linear, a random part of the weight in its low-rank branch.

    weight: [out, in] float32; bias: [out] float32 or None. Returns the weight and bias that the layer now has.
    """
    generator = torch.Generator().manual_seed(seed)
    out, width = weight.shape
    down = (torch.randn(layer.rank, width, generator=generator) * SPREAD).to(layer.proj_down.dtype)
    up = (torch.randn(out, layer.rank, generator=generator) * SPREAD).to(layer.proj_up.dtype)
    layer.proj_down.copy_(packing.pack(down, down=True)), layer.proj_up.copy_(packing.pack(up, down=False))
    layer.smooth_factor.fill_(1), layer.smooth_factor_orig.fill_(1)
    store = _int4 if layer.precision == "int4" else _nvfp4
    residual = store(layer, weight - up.float() @ down.float())
    kernels.keep_weight(layer.qweight, residual)
    effective = residual + up.float() @ down.float()
    if layer.bias is None:
        return effective, None
    # An unsigned activation comes shifted; the checkpoint's bias takes that back.
    shift = kernels.SHIFT * residual.sum(1) if layer.act_unsigned else torch.zeros(out)
    layer.bias.copy_(packing.pack_bias((bias - shift).to(layer.bias.dtype)))
    return effective, packing.unpack_bias(layer.bias).float() + shift


def interleave(planar: torch.Tensor) -> torch.Tensor:
    """Rows [6, dim] of a modulation layer in the order [dim, 6] of the quantized one."""
    return planar.unflatten(0, (6, -1)).transpose(0, 1).flatten(0, 1).contiguous()


def planar(interleaved: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`interleave`."""
    return interleaved.unflatten(0, (-1, 6)).transpose(0, 1).flatten(0, 1).contiguous()


@torch.no_grad()
def fill_awq(layer, weight: torch.Tensor, bias: torch.Tensor, seed: int):
    """Store Qwen-Image's modulation in an AWQW4A16Linear: interleaved, the 1 of the scales in its bias.

    weight: [6 dim, in], bias: [6 dim], planar, float32. Returns the weight and bias that the layer now has, planar.
    """
    groups = interleave(weight).unflatten(1, (-1, layer.group_size))
    zeros = groups.amin(-1).to(layer.wzeros.dtype)
    scales = ((groups.amax(-1) - zeros.float()) / 15).to(layer.wscales.dtype)
    codes = ((groups - zeros.float()[..., None]) / scales.float()[..., None]).round().clamp(0, 15)
    layer.qweight.copy_(packing.pack_awq_codes(codes.flatten(1).to(torch.int32)))
    layer.wscales.copy_(scales.T), layer.wzeros.copy_(zeros.T)
    stored = (codes * scales.float()[..., None] + zeros.float()[..., None]).flatten(1)
    kernels.keep_weight(layer.qweight, stored)
    ones = torch.zeros_like(bias).view(6, -1)
    ones[[1, 4]] = 1
    layer.bias.copy_(interleave(bias + ones.view(-1)))
    return planar(stored), planar(layer.bias.float()) - ones.view(-1)


#: Quantized module -> the unquantized modules whose rows it holds, in order.
FUSED = {
    "attn.to_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "attn.add_qkv_proj": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "feed_forward.w13": ("feed_forward.w3", "feed_forward.w1"),
}


def sources(name: str) -> list[str]:
    """The unquantized modules that the quantized module ``name`` stands for."""
    for fused, parts in FUSED.items():
        if name.endswith(fused):
            return [name.removesuffix(fused) + part for part in parts]
    return [name]


def quantize(quantized: torch.nn.Module, plain: torch.nn.Module) -> None:
    """Store ``plain`` in ``quantized``, and put what was stored back into ``plain``: the two then compute the same."""
    for seed, (name, layer) in enumerate(quantized.named_modules()):
        if hasattr(layer, "qweight"):
            _fill(layer, [plain.get_submodule(source) for source in sources(name)], seed)
            continue
        for key, _ in list(layer.named_parameters(recurse=False)):
            source = plain.get_parameter(f"{name}.{key}" if name else key)
            setattr(layer, key, torch.nn.Parameter(source.detach().clone(), requires_grad=False))


def _fill(layer, parts, seed: int) -> None:
    weight = torch.cat([part.weight for part in parts])
    bias = torch.cat([part.bias for part in parts]) if parts[0].bias is not None else None
    fill = fill_svdq if hasattr(layer, "proj_down") else fill_awq
    weight, bias = fill(layer, weight, bias, seed)
    heights = [len(part.weight) for part in parts]
    for part, rows in zip(parts, weight.split(heights)):
        part.weight.data = rows.clone()
    for part, rows in zip(parts, bias.split(heights) if bias is not None else ()):
        part.bias.data = rows.clone()
