"""Qwen-Image and Qwen-Image-Edit. Diffusers and ComfyUI name the layers alike; Nunchaku fuses q, k and v."""

import re

from .family import Block, Family, Module

_STREAM = (
    Module("{0}_mlp.net.0.proj", "ffn", "hidden"),
    Module("{0}_mlp.net.2", "hidden", "ffn"),
    # Rows of the original layer: shift, scale, gate of the attention, then of the MLP.
    Module("{0}_mod.1", "modulation", "hidden"),
)


def _stream(name):
    return tuple(Module(module.name.format(name), module.out, module.inp) for module in _STREAM)


BLOCK = (
    Module("attn.to_qkv", "qkv", "hidden",
           parts=(("q", ("attn.to_q",)), ("k", ("attn.to_k",)), ("v", ("attn.to_v",)))),
    Module("attn.add_qkv_proj", "qkv", "hidden",
           parts=(("q", ("attn.add_q_proj",)), ("k", ("attn.add_k_proj",)), ("v", ("attn.add_v_proj",)))),
    Module("attn.to_out.0", "hidden", "hidden", aliases=("attn.to_out",)),
    Module("attn.to_add_out", "hidden", "hidden"),
    *_stream("img"),
    *_stream("txt"),
    Module("attn.norm_q", "head", None),
    Module("attn.norm_k", "head", None),
    Module("attn.norm_added_q", "head", None),
    Module("attn.norm_added_k", "head", None),
)

QWEN_IMAGE = Family(
    name="qwen-image",
    title="Qwen-Image",
    dims={"hidden": 3072, "qkv": 9216, "ffn": 12288, "modulation": 18432, "head": 128, "latent": 64, "text": 3584,
          "norm": 6144, "time": 256},
    blocks=(Block("transformer_blocks", 60, BLOCK),),
    singles=(
        Module("img_in", "hidden", "latent"),
        Module("txt_in", "hidden", "text"),
        Module("txt_norm", "text", None),
        Module("norm_out.linear", "norm", "hidden"),
        Module("proj_out", "latent", "hidden"),
        Module("time_text_embed.timestep_embedder.linear_1", "hidden", "time"),
        Module("time_text_embed.timestep_embedder.linear_2", "hidden", "hidden"),
    ),
    # FLUX has transformer_blocks with add_q_proj as well; the two streams' MLPs and modulations are Qwen's own.
    marks=re.compile(r"transformer_blocks[._]\d+[._](img|txt)_(mlp|mod)[._]"),
)
