"""Stand-in for ComfyUI's NextDiT as Z-Image configures it."""

import torch
import torch.nn.functional as F
from torch import nn


def rotary_table(length, width):
    """[1, length, 1, width / 2, 2, 2]: a rotation for each pair of channels of each token."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), 0.1 ** torch.linspace(0, 2, width // 2))
    rows = torch.stack((angles.cos(), -angles.sin(), angles.sin(), angles.cos()), dim=-1)
    return rows.unflatten(-1, (2, 2))[None, :, None]


def rotate(x, table):
    """x: [B, length, heads, width]."""
    pairs = x.unflatten(-1, (-1, 1, 2))
    return (table * pairs).sum(-1).flatten(-2)


class JointAttention(nn.Module):
    def __init__(self, dim, n_heads, operations, dtype, device):
        super().__init__()
        self.head_dim = dim // n_heads
        self.n_kv_heads = self.n_local_heads = self.n_local_kv_heads = n_heads
        self.n_rep = 1
        self.qkv = operations.Linear(dim, 3 * dim, bias=False, dtype=dtype, device=device)
        self.out = operations.Linear(dim, dim, bias=False, dtype=dtype, device=device)
        self.q_norm = operations.RMSNorm(self.head_dim, eps=1e-6, dtype=dtype, device=device)
        self.k_norm = operations.RMSNorm(self.head_dim, eps=1e-6, dtype=dtype, device=device)

    def attend(self, query, key, value):
        """Each [B, length, heads, width]."""
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))

    def forward(self, x, freqs_cis):
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x).chunk(3, dim=-1))
        return self.attend(rotate(self.q_norm(query), freqs_cis), rotate(self.k_norm(key), freqs_cis), value)


class FeedForward(nn.Module):
    def __init__(self, dim, hidden_dim, operations, dtype, device):
        super().__init__()
        self.w1 = operations.Linear(dim, hidden_dim, bias=False, dtype=dtype, device=device)
        self.w2 = operations.Linear(hidden_dim, dim, bias=False, dtype=dtype, device=device)
        self.w3 = operations.Linear(dim, hidden_dim, bias=False, dtype=dtype, device=device)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class JointTransformerBlock(nn.Module):
    def __init__(self, dim, n_heads, hidden_dim, modulation, **settings):
        super().__init__()
        self.attention = JointAttention(dim, n_heads, **settings)
        self.feed_forward = FeedForward(dim, hidden_dim, **settings)
        place = {"dtype": settings["dtype"], "device": settings["device"]}
        for name in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"):
            setattr(self, name, settings["operations"].RMSNorm(dim, eps=1e-5, **place))
        self.adaLN_modulation = None
        if modulation:
            linear = settings["operations"].Linear(min(dim, 256), 4 * dim, bias=True, **place)
            self.adaLN_modulation = nn.Sequential(linear)

    def forward(self, x, freqs_cis, adaln_input=None):
        scale_1, gate_1, scale_2, gate_2 = 1, 1, 1, 1
        if self.adaLN_modulation is not None:
            scale_1, gate_1, scale_2, gate_2 = self.adaLN_modulation(adaln_input).unsqueeze(1).chunk(4, dim=-1)
            scale_1, gate_1, scale_2, gate_2 = 1 + scale_1, gate_1.tanh(), 1 + scale_2, gate_2.tanh()
        x = x + gate_1 * self.attention_norm2(self.attention(self.attention_norm1(x) * scale_1, freqs_cis))
        return x + gate_2 * self.ffn_norm2(self.feed_forward(self.ffn_norm1(x) * scale_2))


class NextDiT(nn.Module):
    def __init__(self, dim, n_heads, n_layers, cap_feat_dim, ffn_dim_multiplier, operations, in_channels=16, dtype=None,
                 device=None, **unused):
        super().__init__()
        settings = {"operations": operations, "dtype": dtype, "device": device}
        hidden_dim = 256 * -(-int(dim * ffn_dim_multiplier) // 256)

        def blocks(count, modulation=True):
            made = (JointTransformerBlock(dim, n_heads, hidden_dim, modulation, **settings) for _ in range(count))
            return nn.ModuleList(made)

        def linear(inputs, outputs):
            return operations.Linear(inputs, outputs, bias=True, dtype=dtype, device=device)

        self.x_embedder = linear(4 * in_channels, dim)
        norm = operations.RMSNorm(cap_feat_dim, dtype=dtype, device=device)
        self.cap_embedder = nn.Sequential(norm, linear(cap_feat_dim, dim))
        self.t_embedder = nn.Module()
        self.t_embedder.mlp = nn.Sequential(linear(256, min(dim, 1024)), nn.SiLU(), linear(min(dim, 1024), 256))
        self.noise_refiner, self.context_refiner, self.layers = blocks(2), blocks(2, modulation=False), blocks(n_layers)
        self.final_layer = nn.Module()
        self.final_layer.linear = linear(dim, 4 * in_channels)
        self.final_layer.adaLN_modulation = nn.Sequential(nn.SiLU(), linear(256, dim))
        self.norm_final = operations.RMSNorm(dim, dtype=dtype, device=device)
        self.head_dim = dim // n_heads

    def forward(self, x, timesteps, context, num_tokens=None, transformer_options={}, **kwargs):
        """x: [B, C, H, W]; one token for each 2 x 2 pixels, the text's tokens in front."""
        angles = (1 - timesteps[:, None]) * torch.arange(1, 129, dtype=torch.float32)
        t = self.t_embedder.mlp(torch.cat((angles.cos(), angles.sin()), dim=-1))
        img = self.x_embedder(F.pixel_unshuffle(x, 2).flatten(2).transpose(1, 2))
        txt = self.cap_embedder(context)
        table = rotary_table(txt.shape[1] + img.shape[1], self.head_dim)
        for block in self.context_refiner:
            txt = block(txt, table[:, : txt.shape[1]])
        for block in self.noise_refiner:
            img = block(img, table[:, txt.shape[1]:], t)
        both = torch.cat((txt, img), dim=1)
        for block in self.layers:
            both = block(both, table, t)
        scale = 1 + self.final_layer.adaLN_modulation(t).unsqueeze(1)
        img = F.layer_norm(both[:, txt.shape[1]:], both.shape[-1:]) * scale
        img = self.final_layer.linear(img).transpose(1, 2)
        return -F.pixel_shuffle(img.unflatten(-1, (x.shape[-2] // 2, x.shape[-1] // 2)), 2)


def clamp_fp16(x):
    return torch.nan_to_num(x, nan=0.0, posinf=65504, neginf=-65504) if x.dtype == torch.float16 else x
