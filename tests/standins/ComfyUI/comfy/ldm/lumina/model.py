"""Stand-in for ComfyUI's NextDiT: the module tree of Z-Image, without its forward."""

import torch
from torch import nn


class JointAttention(nn.Module):
    def __init__(self, dim, n_heads, operations, dtype, device):
        super().__init__()
        self.head_dim = dim // n_heads
        self.n_kv_heads = self.n_local_heads = self.n_local_kv_heads = n_heads
        self.n_rep = 1
        self.qkv = operations.Linear(dim, 3 * dim, bias=False, dtype=dtype, device=device)
        self.out = operations.Linear(dim, dim, bias=False, dtype=dtype, device=device)
        self.q_norm = operations.RMSNorm(self.head_dim, dtype=dtype, device=device)
        self.k_norm = operations.RMSNorm(self.head_dim, dtype=dtype, device=device)


class FeedForward(nn.Module):
    def __init__(self, dim, hidden_dim, operations, dtype, device):
        super().__init__()
        self.w1 = operations.Linear(dim, hidden_dim, bias=False, dtype=dtype, device=device)
        self.w2 = operations.Linear(hidden_dim, dim, bias=False, dtype=dtype, device=device)
        self.w3 = operations.Linear(dim, hidden_dim, bias=False, dtype=dtype, device=device)


class JointTransformerBlock(nn.Module):
    def __init__(self, dim, n_heads, hidden_dim, **settings):
        super().__init__()
        self.attention = JointAttention(dim, n_heads, **settings)
        self.feed_forward = FeedForward(dim, hidden_dim, **settings)


class NextDiT(nn.Module):
    def __init__(self, dim, n_heads, n_layers, cap_feat_dim, ffn_dim_multiplier, operations, dtype=None, device=None,
                 **unused):
        super().__init__()
        settings = {"operations": operations, "dtype": dtype, "device": device}
        hidden_dim = 256 * -(-int(dim * ffn_dim_multiplier) // 256)

        def blocks(count):
            return nn.ModuleList(JointTransformerBlock(dim, n_heads, hidden_dim, **settings) for _ in range(count))

        self.cap_embedder = operations.Linear(cap_feat_dim, dim, bias=True, dtype=dtype, device=device)
        self.noise_refiner, self.context_refiner, self.layers = blocks(2), blocks(2), blocks(n_layers)
        self.norm_final = operations.RMSNorm(dim, dtype=dtype, device=device)


def clamp_fp16(x):
    return torch.nan_to_num(x, nan=0.0, posinf=65504, neginf=-65504) if x.dtype == torch.float16 else x
