"""Small module trees with the names and parameters of nunchaku's models, and what their packed factors mean.

The packed order is written here as index formulas, element by element, apart from any packer.
"""

from __future__ import annotations

import torch
from torch import nn

BF16 = torch.bfloat16

#: Stored position -> place in each 16 values of a packed bias.
BIAS_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


def unpacked(factor: torch.Tensor, down: bool) -> torch.Tensor:
    """A packed factor [channels, rank] as float64: down [rank, channels] or up [channels, rank]."""
    channels, rank = factor.shape
    i = torch.arange(channels * rank)
    fragment, inside = i // 256, i % 256
    channel_fragment, rank_fragment = fragment // (rank // 16), fragment % (rank // 16)
    n = inside // 4 % 2 * 8 + inside // 32
    k = inside // 2 % 2 * 8 + inside // 8 % 4 * 2 + inside % 2
    plain = torch.empty((rank, channels) if down else (channels, rank), dtype=torch.float64)
    row_fragment, column_fragment = (rank_fragment, channel_fragment) if down else (channel_fragment, rank_fragment)
    plain[row_fragment * 16 + n, column_fragment * 16 + k] = factor.detach().reshape(-1).double()
    return plain


def effective(module: nn.Module, prefix: str = "") -> torch.Tensor:
    """up @ down of a module's low-rank branch, [out, in] float64."""
    up, down = getattr(module, prefix + "proj_up"), getattr(module, prefix + "proj_down")
    return unpacked(up, False) @ unpacked(down, True)


def plain_bias(packed: torch.Tensor) -> torch.Tensor:
    """A packed bias in plain order, float64."""
    plain = torch.empty(len(packed), dtype=torch.float64)
    for stored, value in enumerate(packed.detach().double()):
        plain[stored // 16 * 16 + BIAS_ORDER[stored % 16]] = value
    return plain


class SVDQW4A4Linear(nn.Module):
    """The parameters of nunchaku's class, filled with noise."""

    def __init__(self, inp, out, rank=16, bias=True, dtype=BF16, precision="int4"):
        super().__init__()
        self.in_features, self.out_features, self.rank, self.precision = inp, out, rank, precision
        group = 64 if precision == "int4" else 16
        scales = torch.rand(inp // group, out) + 0.5
        self.qweight = nn.Parameter(torch.randint(-128, 128, (out, inp // 2), dtype=torch.int8), requires_grad=False)
        scale_dtype = dtype if precision == "int4" else torch.float8_e4m3fn
        self.wscales = nn.Parameter(scales.to(scale_dtype), requires_grad=False)
        self.smooth_factor = nn.Parameter((torch.rand(inp) + 0.5).to(dtype), requires_grad=False)
        self.proj_down = nn.Parameter((torch.randn(inp, rank) * 0.1).to(dtype))
        self.proj_up = nn.Parameter((torch.randn(out, rank) * 0.1).to(dtype))
        self.bias = nn.Parameter(torch.randn(out).to(dtype)) if bias else None
        self.wcscales = nn.Parameter((torch.rand(out) + 0.5).to(dtype), requires_grad=False) if group == 16 else None
        self.wtscale = 0.5 if group == 16 else None


class AWQW4A16Linear(nn.Module):
    """The parameters of nunchaku's class; the forward gives ``self.plain(x)``, rows interleaved as they are stored."""

    def __init__(self, inp, out, dtype=BF16):
        super().__init__()
        packed = torch.randint(-2**31, 2**31 - 1, (out // 4, inp // 2), dtype=torch.int32)
        self.qweight = nn.Parameter(packed, requires_grad=False)
        self.wscales = nn.Parameter((torch.rand(max(inp // 64, 1), out) + 0.5).to(dtype), requires_grad=False)
        self.wzeros = nn.Parameter(torch.randn(max(inp // 64, 1), out).to(dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(out).to(dtype))
        self.register_buffer("matrix", torch.randn(out, inp), persistent=False)

    def forward(self, x):
        return (x.float() @ self.matrix.float().T).to(x.dtype) + self.bias


def tree(modules: dict[str, nn.Module]) -> nn.Module:
    """A module tree from dotted names; numbered levels become ModuleLists."""
    root, lists = nn.Module(), nn.ModuleList
    inner: dict[str, dict] = {}
    for name, module in modules.items():
        first, _, rest = name.partition(".")
        inner.setdefault(first, {})[rest] = module
    if inner and all(name.isdigit() for name in inner):
        root = lists()
        for name in sorted(inner, key=int):
            # Gaps, such as the activation between two layers, are filled.
            while len(root) < int(name):
                root.append(nn.Identity())
            root.append(_branch(inner[name]))
        return root
    for name, below in inner.items():
        root.add_module(name, _branch(below))
    return root


def _branch(below):
    return below[""] if "" in below else tree(below)


def norm(dim, dtype=BF16):
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(dim).to(dtype))
    return module


def linear(inp, out, bias=True, dtype=BF16):
    return nn.Linear(inp, out, bias, dtype=dtype)


def qwen(blocks=1, h=64, f=128, rank=16, dtype=BF16, precision="int4", plain=False) -> nn.Module:
    """Qwen-Image as nunchaku quantizes it, or (``plain``) as ComfyUI has it unquantized."""
    modules = {"img_in": linear(16, h, dtype=dtype), "txt_in": linear(32, h, dtype=dtype),
               "proj_out": linear(h, 16, dtype=dtype), "txt_norm": norm(32, dtype),
               "norm_out.linear": linear(h, 2 * h, dtype=dtype),
               "time_text_embed.timestep_embedder.linear_1": linear(32, h, dtype=dtype),
               "time_text_embed.timestep_embedder.linear_2": linear(h, h, dtype=dtype)}

    def layer(inp, out):
        if plain:
            return linear(inp, out, dtype=dtype)
        return SVDQW4A4Linear(inp, out, rank, dtype=dtype, precision=precision)

    for index in range(blocks):
        block = f"transformer_blocks.{index}."
        if plain:
            names = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
            modules.update({f"{block}attn.{name}": linear(h, h, dtype=dtype) for name in names})
        else:
            modules.update({f"{block}attn.{name}": layer(h, 3 * h) for name in ("to_qkv", "add_qkv_proj")})
        modules.update({f"{block}attn.to_out.0": layer(h, h), f"{block}attn.to_add_out": layer(h, h)})
        norms = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
        modules.update({f"{block}attn.{name}": norm(16, dtype) for name in norms})
        for stream in ("img", "txt"):
            modules.update({f"{block}{stream}_mlp.net.0.proj": layer(h, f), f"{block}{stream}_mlp.net.2": layer(f, h)})
            modulation = linear(h, 6 * h, dtype=dtype) if plain else AWQW4A16Linear(h, 6 * h, dtype)
            modules[f"{block}{stream}_mod.1"] = modulation
    return tree(modules)


class FusedModule(nn.Module):
    """NunchakuZImageFusedModule: the parameters of a qkv layer and two norms, under names of its own."""

    def __init__(self, qkv, norm_q, norm_k):
        super().__init__()
        for lead, module in (("qkv_", qkv), ("norm_q_", norm_q), ("norm_k_", norm_k)):
            for name, parameter in module.named_parameters():
                setattr(self, lead + name, parameter)


def z_image(blocks=1, h=64, f=96, rank=16, dtype=BF16, precision="int4", refiners="fused", diffusers=None) -> nn.Module:
    """Z-Image as ComfyUI-nunchaku has it; ``diffusers``: "fused_module" or "to_qkv" for nunchaku's own class.

    ``refiners``: "fused" (quantized like the layers) or "plain".
    """
    final, embed = (("all_final_layer.2-1", "all_x_embedder.2-1") if diffusers else ("final_layer", "x_embedder"))
    modules = {embed: linear(16, h, dtype=dtype), f"{final}.linear": linear(h, 16, dtype=dtype),
               f"{final}.adaLN_modulation.1": linear(32, h, dtype=dtype), "cap_embedder.1": linear(48, h, dtype=dtype),
               "cap_embedder.0": norm(48, dtype),
               "t_embedder.mlp.0": linear(32, 64, dtype=dtype), "t_embedder.mlp.2": linear(64, 32, dtype=dtype)}
    for name in ("layers", "noise_refiner", "context_refiner"):
        for index in range(blocks if name == "layers" else 1):
            block, quantized = f"{name}.{index}.", name == "layers" or refiners == "fused"
            modules.update({block + inside: module
                            for inside, module in _z_block(h, f, rank, dtype, precision, quantized, diffusers).items()})
            if name != "context_refiner":
                modules[f"{block}adaLN_modulation.0"] = linear(32, 4 * h, dtype=dtype)
    return tree(modules)


def _z_block(h, f, rank, dtype, precision, quantized, diffusers):
    def layer(inp, out):
        return (SVDQW4A4Linear(inp, out, rank, False, dtype, precision) if quantized
                else linear(inp, out, bias=False, dtype=dtype))

    modules = {"attention_norm1": norm(h, dtype), "ffn_norm1": norm(h, dtype)}
    if not diffusers:
        modules.update({"attention.qkv": layer(h, 3 * h), "attention.out": layer(h, h), "feed_forward.w2": layer(f, h),
                        "attention.q_norm": norm(16, dtype), "attention.k_norm": norm(16, dtype)})
        gate = {"feed_forward.w13": layer(h, 2 * f)} if quantized else {
            "feed_forward.w1": layer(h, f), "feed_forward.w3": layer(h, f)}
        return {**modules, **gate}
    modules.update({"attention.to_out.0": layer(h, h), "feed_forward.net.0.proj": layer(h, 2 * f),
                    "feed_forward.net.2": layer(f, h)})
    if not quantized:
        modules.update({f"attention.to_{part}": layer(h, h) for part in "qkv"})
    if quantized and diffusers == "fused_module":
        modules["attention.fused_module"] = FusedModule(layer(h, 3 * h), norm(16, dtype), norm(16, dtype))
        return modules
    if quantized:
        modules["attention.to_qkv"] = layer(h, 3 * h)
    return {**modules, "attention.norm_q": norm(16, dtype), "attention.norm_k": norm(16, dtype)}


#: Extents of these trees, as producers.make takes them.
QWEN_DIMS = {"h": 64, "f": 128, "m": 384, "l": 16, "t": 32, "n": 128, "c": 32}
Z_DIMS = {"h": 64, "f": 96, "m": 256, "l": 16, "t": 48, "c": 32, "e": 64}
