"""Fill the quantized layers of a tiny model from the weights of its unquantized twin.

Works on any classes that keep nunchaku's contract: the real ones and the stand-ins.
"""

import torch

from . import kernels
from .packing import pack, pack_bias, unpack_bias

#: Strength of random weights: small enough that two blocks stay tame, large enough that a LoRA is seen.
SPREAD = 0.06


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter of an unquantized model random float32 values; norms lie around one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator) * SPREAD
        value = 1 + noise if parameter.ndim == 1 and name.endswith("weight") else noise
        owner = model.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], torch.nn.Parameter(value, requires_grad=False))


def fill_svdq(layer, weight: torch.Tensor, bias: torch.Tensor | None, seed: int) -> torch.Tensor | None:
    """Let an SVDQW4A4Linear compute ``x @ weight.T + bias``, a random part of it in the low-rank branch.

    weight: [out, in] float32; bias: [out] float32 or None.
    Returns the bias that the layer has in effect: the stored one is rounded to the layer's dtype.
    """
    generator = torch.Generator().manual_seed(seed)
    out, width = weight.shape
    down = (torch.randn(layer.rank, width, generator=generator) * SPREAD).to(layer.proj_down.dtype)
    up = (torch.randn(out, layer.rank, generator=generator) * SPREAD).to(layer.proj_up.dtype)
    residual = weight - up.float() @ down.float()
    with torch.no_grad():
        layer.proj_down.copy_(pack(down, down=True))
        layer.proj_up.copy_(pack(up, down=False))
        layer.qweight.copy_(torch.randint(-128, 128, layer.qweight.shape, generator=generator, dtype=torch.int8))
        layer.wscales.fill_(1), layer.smooth_factor.fill_(1), layer.smooth_factor_orig.fill_(1)
    kernels.keep_weight(layer.qweight, residual)
    if layer.bias is None:
        return None
    # An unsigned activation comes shifted; the checkpoint's bias takes that back.
    shift = kernels.SHIFT * residual.sum(1) if layer.act_unsigned else torch.zeros(out)
    with torch.no_grad():
        layer.bias.copy_(pack_bias((bias - shift).to(layer.bias.dtype)))
    return unpack_bias(layer.bias.detach()).float() + shift


def interleave(planar: torch.Tensor) -> torch.Tensor:
    """Rows [6, dim] of a modulation layer in the order [dim, 6] of the quantized one."""
    return planar.unflatten(0, (6, -1)).transpose(0, 1).flatten(0, 1).contiguous()


def planar(interleaved: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`interleave`."""
    return interleaved.unflatten(0, (-1, 6)).transpose(0, 1).flatten(0, 1).contiguous()


def fill_awq(layer, weight: torch.Tensor, bias: torch.Tensor, seed: int) -> torch.Tensor:
    """Let an AWQW4A16Linear compute Qwen-Image's modulation, interleaved, the 1 of the scales in its bias.

    weight: [6 dim, in], bias: [6 dim], planar, float32. Returns the bias in effect, planar.
    """
    generator = torch.Generator().manual_seed(seed)
    high = 2 ** 31 - 1
    with torch.no_grad():
        layer.qweight.copy_(torch.randint(-high, high, layer.qweight.shape, generator=generator, dtype=torch.int32))
        layer.wscales.fill_(1), layer.wzeros.fill_(0)
        ones = torch.zeros_like(bias).view(6, -1)
        ones[[1, 4]] = 1
        layer.bias.copy_(interleave(bias + ones.view(-1)))
    kernels.keep_weight(layer.qweight, interleave(weight))
    return planar(layer.bias.detach().float()) - ones.view(-1)


#: Quantized module -> the unquantized modules whose rows it holds, in order.
FUSED = {
    "attn.to_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "attn.add_qkv_proj": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "feed_forward.w13": ("feed_forward.w3", "feed_forward.w1"),
}


def _sources(name: str) -> list[str]:
    for fused, parts in FUSED.items():
        if name.endswith(fused):
            return [name.removesuffix(fused) + part for part in parts]
    return [name]


def quantize(quantized: torch.nn.Module, plain: torch.nn.Module) -> None:
    """Make ``quantized`` compute what ``plain`` computes.

    Where a stored bias had to be rounded, ``plain`` gets the rounded one.
    """
    for seed, (name, layer) in enumerate(quantized.named_modules()):
        parts = [plain.get_submodule(source) for source in _sources(name)] if hasattr(layer, "qweight") else ()
        if parts:
            _fill(layer, parts, seed)
        elif not hasattr(layer, "qweight"):
            for key, parameter in layer.named_parameters(recurse=False):
                source = plain.get_parameter(f"{name}.{key}" if name else key)
                setattr(layer, key, torch.nn.Parameter(source.detach().clone(), requires_grad=False))


def _fill(layer, parts, seed: int) -> None:
    weight = torch.cat([part.weight.detach() for part in parts])
    bias = torch.cat([part.bias.detach() for part in parts]) if parts[0].bias is not None else None
    fill = fill_svdq if hasattr(layer, "proj_down") else fill_awq
    effective = fill(layer, weight, bias, seed)
    if effective is not None:
        for part, rows in zip(parts, effective.split([len(part.bias) for part in parts])):
            part.bias.data = rows.clone()
