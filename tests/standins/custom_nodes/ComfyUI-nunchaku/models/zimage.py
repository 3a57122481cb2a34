"""Stand-in for ComfyUI-nunchaku's models.zimage: Z-Image's blocks with quantized layers."""

import torch.nn as nn
import torch.nn.functional as F
from comfy.ldm.lumina.model import JointAttention
from nunchaku.models.linear import SVDQW4A4Linear


def add_comfy_cast_weights_attr(svdq_linear, comfy_linear):
    if hasattr(comfy_linear, "comfy_cast_weights"):
        svdq_linear.comfy_cast_weights = comfy_linear.comfy_cast_weights
        # Upstream's fault: such a layer looks like a lazy Linear.
        svdq_linear.weight = None


def fuse_to_svdquant_linear(comfy_linear1, comfy_linear2, **kwargs):
    assert comfy_linear1.in_features == comfy_linear2.in_features
    assert comfy_linear1.bias is None and comfy_linear2.bias is None
    # Upstream's fault: the default is evaluated even when torch_dtype is given.
    torch_dtype = kwargs.pop("torch_dtype", comfy_linear1.weight.dtype)
    fused = SVDQW4A4Linear(
        comfy_linear1.in_features,
        comfy_linear1.out_features + comfy_linear2.out_features,
        bias=False,
        torch_dtype=torch_dtype,
        device=comfy_linear1.weight.device,
        **kwargs,
    )
    add_comfy_cast_weights_attr(fused, comfy_linear1)
    return fused


class ComfyNunchakuZImageAttention(JointAttention):
    def __init__(self, orig_attn, **kwargs):
        nn.Module.__init__(self)
        for name in ("n_kv_heads", "n_local_heads", "n_local_kv_heads", "n_rep", "head_dim", "q_norm", "k_norm"):
            setattr(self, name, getattr(orig_attn, name))
        self.qkv = SVDQW4A4Linear.from_linear(orig_attn.qkv, **kwargs)
        add_comfy_cast_weights_attr(self.qkv, orig_attn.qkv)
        self.out = SVDQW4A4Linear.from_linear(orig_attn.out, **kwargs)
        add_comfy_cast_weights_attr(self.out, orig_attn.out)

    def forward(self, x, freqs_cis):
        from nunchaku.ops.fused import fused_qkv_norm_rotary, pack_rotary

        fused = fused_qkv_norm_rotary(x, self.qkv, self.q_norm.weight, self.k_norm.weight, pack_rotary(freqs_cis))
        return self.attend(*(part.unflatten(-1, (-1, self.head_dim)) for part in fused.chunk(3, dim=-1)))


class ComfyNunchakuZImageFeedForward(nn.Module):
    def __init__(self, orig_ff, **kwargs):
        super().__init__()
        self.w13 = fuse_to_svdquant_linear(orig_ff.w1, orig_ff.w3, **kwargs)
        self.w2 = SVDQW4A4Linear.from_linear(orig_ff.w2, **kwargs)
        add_comfy_cast_weights_attr(self.w2, orig_ff.w2)

    def forward(self, x):
        x3, x1 = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(x1) * x3)


def patch_model(diffusion_model, skip_refiners, **kwargs):
    chosen = [diffusion_model.layers]
    if not skip_refiners:
        chosen += [diffusion_model.noise_refiner, diffusion_model.context_refiner]
    for blocks in chosen:
        for block in blocks:
            block.attention = ComfyNunchakuZImageAttention(block.attention, **kwargs)
            block.feed_forward = ComfyNunchakuZImageFeedForward(block.feed_forward, **kwargs)
    diffusion_model.norm_final = None
