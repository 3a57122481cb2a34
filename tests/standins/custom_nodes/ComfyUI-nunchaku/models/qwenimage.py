"""Stand-in for Nunchaku Qwen-Image: fused projections, a fused MLP, modulation rows interleaved."""

from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel, QwenImageTransformerBlock, joint_attention
from nunchaku.models.linear import AWQW4A16Linear, SVDQW4A4Linear
from nunchaku.ops.fused import fused_gelu_mlp
from torch import nn


class NunchakuFeedForward(nn.Module):
    def __init__(self, dim, precision, **settings):
        super().__init__()
        first = nn.Module()
        first.proj = SVDQW4A4Linear(dim, 4 * dim, precision=precision, **settings)
        second = SVDQW4A4Linear(4 * dim, dim, precision=precision, act_unsigned=precision == "int4", **settings)
        self.net = nn.ModuleList([first, nn.Dropout(0.0), second])

    def forward(self, x):
        return fused_gelu_mlp(x, self.net[0].proj, self.net[2])


class NunchakuAttention(nn.Module):
    def __init__(self, dim, heads, operations, dtype, device, **quantized):
        super().__init__()
        self.heads = heads
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            setattr(self, name, operations.RMSNorm(dim // heads, eps=1e-6, dtype=dtype, device=device))
        self.to_qkv = SVDQW4A4Linear(dim, 3 * dim, torch_dtype=dtype, **quantized)
        self.add_qkv_proj = SVDQW4A4Linear(dim, 3 * dim, torch_dtype=dtype, **quantized)
        self.to_out = nn.ModuleList([SVDQW4A4Linear(dim, dim, torch_dtype=dtype, **quantized), nn.Dropout(0.0)])
        self.to_add_out = SVDQW4A4Linear(dim, dim, torch_dtype=dtype, **quantized)

    def forward(self, hidden_states, encoder_hidden_states, **_):
        return joint_attention(self, self.to_qkv(hidden_states).chunk(3, dim=-1),
                               self.add_qkv_proj(encoder_hidden_states).chunk(3, dim=-1))


class NunchakuQwenImageTransformerBlock(QwenImageTransformerBlock):
    def __init__(self, dim, heads, operations, dtype, device, scale_shift, rank, precision):
        nn.Module.__init__(self)
        self.scale_shift, quantized = scale_shift, {"rank": rank, "precision": precision}
        self.img_mod = nn.Sequential(nn.SiLU(), AWQW4A16Linear(dim, 6 * dim, torch_dtype=dtype))
        self.txt_mod = nn.Sequential(nn.SiLU(), AWQW4A16Linear(dim, 6 * dim, torch_dtype=dtype))
        for name in ("img_norm1", "img_norm2", "txt_norm1", "txt_norm2"):
            setattr(self, name, nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False))
        self.img_mlp = NunchakuFeedForward(dim, torch_dtype=dtype, **quantized)
        self.txt_mlp = NunchakuFeedForward(dim, torch_dtype=dtype, **quantized)
        self.attn = NunchakuAttention(dim, heads, operations, dtype, device, **quantized)

    def rows(self, modulation):
        return modulation.unflatten(-1, (-1, 6)).transpose(1, 2).flatten(1)


class NunchakuQwenImageTransformer2DModel(QwenImageTransformer2DModel):
    block = NunchakuQwenImageTransformerBlock
    offload, offload_manager = False, None

    def __init__(self, transformer_offload_device=None, **config):
        super().__init__(**config)

    def to_safely(self, *args, **kwargs):
        return self if self.offload else self.to(*args, **kwargs)

    def set_offload(self, offload, **kwargs):
        from nunchaku.models.utils import CPUOffloadManager

        self.offload = offload
        self.offload_manager = CPUOffloadManager(self.transformer_blocks, **kwargs) if offload else None

    def get_block(self, index):
        return self.offload_manager.get_block(index) if self.offload else super().get_block(index)
