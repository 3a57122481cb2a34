"""Stand-in for ComfyUI's Qwen-Image: two streams with joint attention; positions are left out."""

import torch
import torch.nn.functional as F
from torch import nn


class GELU(nn.Module):
    def __init__(self, dim_in, dim_out, **settings):
        super().__init__()
        operations = settings.pop("operations")
        self.proj = operations.Linear(dim_in, dim_out, **settings)

    def forward(self, x):
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    def __init__(self, dim, operations, **settings):
        super().__init__()
        self.net = nn.ModuleList([GELU(dim, 4 * dim, operations=operations, **settings), nn.Dropout(0.0),
                                  operations.Linear(4 * dim, dim, **settings)])

    def forward(self, x):
        for module in self.net:
            x = module(x)
        return x


def joint_attention(attn, image, text):
    """image and text: (q, k, v) of each stream; the attended streams, image first."""
    streams = []
    norms_of = (text, (attn.norm_added_q, attn.norm_added_k)), (image, (attn.norm_q, attn.norm_k))
    for (query, key, value), norms in norms_of:
        heads = [part.unflatten(-1, (attn.heads, -1)) for part in (query, key, value)]
        streams.append((norms[0](heads[0]), norms[1](heads[1]), heads[2]))
    query, key, value = (torch.cat(parts, dim=1).transpose(1, 2) for parts in zip(*streams))
    attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    text_length = text[0].shape[1]
    return attn.to_out[0](attended[:, text_length:]), attn.to_add_out(attended[:, :text_length])


class Attention(nn.Module):
    def __init__(self, dim, heads, operations, **settings):
        super().__init__()
        self.heads = heads
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            setattr(self, name, operations.RMSNorm(dim // heads, eps=1e-6, **settings))
        for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
            setattr(self, name, operations.Linear(dim, dim, **settings))
        self.to_out = nn.ModuleList([operations.Linear(dim, dim, **settings), nn.Dropout(0.0)])

    def forward(self, hidden_states, encoder_hidden_states):
        image = self.to_q(hidden_states), self.to_k(hidden_states), self.to_v(hidden_states)
        text = (self.add_q_proj(encoder_hidden_states), self.add_k_proj(encoder_hidden_states),
                self.add_v_proj(encoder_hidden_states))
        return joint_attention(self, image, text)


class QwenImageTransformerBlock(nn.Module):
    #: What is added to a scale that comes out of the modulation layer.
    scale_shift = 1.0

    def __init__(self, dim, heads, operations, **settings):
        super().__init__()
        self.dim = dim
        self.img_mod = nn.Sequential(nn.SiLU(), operations.Linear(dim, 6 * dim, **settings))
        self.txt_mod = nn.Sequential(nn.SiLU(), operations.Linear(dim, 6 * dim, **settings))
        for name in ("img_norm1", "img_norm2", "txt_norm1", "txt_norm2"):
            setattr(self, name, nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False))
        self.img_mlp = FeedForward(dim, operations, **settings)
        self.txt_mlp = FeedForward(dim, operations, **settings)
        self.attn = Attention(dim, heads, operations, **settings)

    def rows(self, modulation):
        """The layer's output as planar rows [B, 6 dim]."""
        return modulation

    def _modulate(self, x, params):
        shift, scale, gate = params.unsqueeze(1).chunk(3, dim=-1)
        return x * (self.scale_shift + scale) + shift, gate

    def forward(self, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, temb, image_rotary_emb=None,
                timestep_zero_index=None, transformer_options={}):
        img_1, img_2 = self.rows(self.img_mod(temb)).chunk(2, dim=-1)
        txt_1, txt_2 = self.rows(self.txt_mod(temb)).chunk(2, dim=-1)
        img, img_gate = self._modulate(self.img_norm1(hidden_states), img_1)
        txt, txt_gate = self._modulate(self.txt_norm1(encoder_hidden_states), txt_1)
        img, txt = self.attn(hidden_states=img, encoder_hidden_states=txt)
        hidden_states = hidden_states + img_gate * img
        encoder_hidden_states = encoder_hidden_states + txt_gate * txt
        img, img_gate = self._modulate(self.img_norm2(hidden_states), img_2)
        txt, txt_gate = self._modulate(self.txt_norm2(encoder_hidden_states), txt_2)
        return encoder_hidden_states + txt_gate * self.txt_mlp(txt), hidden_states + img_gate * self.img_mlp(img)


class TimestepEmbedder(nn.Module):
    def __init__(self, dim, operations, **settings):
        super().__init__()
        self.linear_1 = operations.Linear(256, dim, **settings)
        self.linear_2 = operations.Linear(dim, dim, **settings)


class QwenImageTransformer2DModel(nn.Module):
    block = QwenImageTransformerBlock

    def __init__(self, in_channels, num_layers, attention_head_dim, num_attention_heads, joint_attention_dim,
                 operations, image_model=None, dtype=None, device=None, **more):
        super().__init__()
        dim, settings = attention_head_dim * num_attention_heads, {"dtype": dtype, "device": device}
        self.time_text_embed = nn.Module()
        self.time_text_embed.timestep_embedder = TimestepEmbedder(dim, operations, **settings)
        self.txt_norm = operations.RMSNorm(joint_attention_dim, eps=1e-6, **settings)
        self.img_in = operations.Linear(in_channels, dim, **settings)
        self.txt_in = operations.Linear(joint_attention_dim, dim, **settings)
        self.transformer_blocks = nn.ModuleList(
            self.block(dim, num_attention_heads, operations, **settings, **more) for _ in range(num_layers))
        self.norm_out = nn.Module()
        self.norm_out.linear = operations.Linear(dim, 2 * dim, **settings)
        self.proj_out = operations.Linear(dim, in_channels, **settings)

    def _embed_time(self, timestep):
        angles = timestep[:, None] * torch.arange(1, 129, dtype=torch.float32)
        layers = self.time_text_embed.timestep_embedder
        return layers.linear_2(F.silu(layers.linear_1(torch.cat((angles.cos(), angles.sin()), dim=-1))))

    def get_block(self, index):
        return self.transformer_blocks[index]

    def forward(self, x, timestep, context, transformer_options={}, control=None, **kwargs):
        """x: [B, C, 1, H, W]; one token for each 2 x 2 pixels."""
        img = F.pixel_unshuffle(x[:, :, 0], 2).flatten(2).transpose(1, 2)
        img, txt, temb = self.img_in(img), self.txt_in(self.txt_norm(context)), self._embed_time(timestep)
        replaced = transformer_options.get("patches_replace", {}).get("dit", {})
        for index in range(len(self.transformer_blocks)):
            block = self.get_block(index)

            def run(args, block=block):
                txt, img = block(hidden_states=args["img"], encoder_hidden_states=args["txt"],
                                 encoder_hidden_states_mask=None, temb=args["vec"], image_rotary_emb=args["pe"])
                return {"txt": txt, "img": img}

            args = {"img": img, "txt": txt, "vec": temb, "pe": None}
            patch = replaced.get(("double_block", index))
            out = run(args) if patch is None else patch(args, {"original_block": run})
            img, txt = out["img"], out["txt"]
            if control is not None and control["input"][index] is not None:
                img = img + control["input"][index]
        scale, shift = self.norm_out.linear(F.silu(temb)).unsqueeze(1).chunk(2, dim=-1)
        img = self.proj_out(F.layer_norm(img, img.shape[-1:]) * (1 + scale) + shift)
        height, width = x.shape[-2] // 2, x.shape[-1] // 2
        return F.pixel_shuffle(img.transpose(1, 2).unflatten(-1, (height, width)), 2).unsqueeze(2)
