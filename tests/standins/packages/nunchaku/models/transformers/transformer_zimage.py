"""Stand-in for nunchaku's diffusers form of Z-Image: fused q, k, v and a converted feed-forward."""

import torch
from torch import nn

from ..linear import SVDQW4A4Linear
from ..utils import fuse_linears


class ZImageFeedForward(nn.Module):
    """Stands for diffusers' class of this kind."""

    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)


class FeedForward(nn.Module):
    """Stands for diffusers' class of this name: the gated projection and the output."""

    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(dim, 2 * hidden_dim, bias=False), nn.Linear(hidden_dim, dim, bias=False)])


def quantized_qkv(attention, **kwargs):
    with torch.device("meta"):
        fused = fuse_linears([attention.to_q, attention.to_k, attention.to_v])
    return SVDQW4A4Linear.from_linear(fused, **kwargs)


def _convert_z_image_ff(z_ff):
    assert isinstance(z_ff, ZImageFeedForward)
    made = FeedForward(z_ff.w1.in_features, z_ff.w2.in_features)
    return made.to(dtype=z_ff.w1.weight.dtype, device=z_ff.w1.weight.device)
