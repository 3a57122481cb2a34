"""Z-Image and Z-Image-Turbo. Diffusers splits q, k and v; ComfyUI fuses them; Nunchaku also fuses w3 and w1."""

import re

from .family import Block, Family, Module

_CORE = (
    Module("attention.qkv", "qkv", "hidden",
           parts=(("q", ("attention.to_q",)), ("k", ("attention.to_k",)), ("v", ("attention.to_v",))),
           aliases=("attention.to_qkv", "attention.wqkv")),
    Module("attention.out", "hidden", "hidden",
           aliases=("attention.to_out.0", "attention.to_out", "attention.out.0", "attention.wo")),
    # The forward computes silu(w1 x) * (w3 x) and takes w3 from the first half of the rows.
    Module("feed_forward.w13", "w13", "hidden",
           parts=(("w3", ("feed_forward.w3",)), ("w1", ("feed_forward.w1",))),
           aliases=("feed_forward.net.0.proj",)),
    Module("feed_forward.w2", "hidden", "ffn", aliases=("feed_forward.net.2",)),
    Module("attention.q_norm", "head", None, aliases=("attention.norm_q",)),
    Module("attention.k_norm", "head", None, aliases=("attention.norm_k",)),
    Module("attention_norm1", "hidden", None),
    Module("attention_norm2", "hidden", None),
    Module("ffn_norm1", "hidden", None),
    Module("ffn_norm2", "hidden", None),
)
_MODULATED = (*_CORE, Module("adaLN_modulation.0", "modulation", "condition"))

Z_IMAGE = Family(
    name="z-image",
    title="Z-Image",
    dims={"hidden": 3840, "qkv": 11520, "ffn": 10240, "w13": 20480, "modulation": 15360, "condition": 256, "head": 128,
          "latent": 64, "text": 2560, "time": 256, "time_hidden": 1024},
    blocks=(
        Block("layers", 30, _MODULATED),
        Block("noise_refiner", 2, _MODULATED),
        Block("context_refiner", 2, _CORE),
    ),
    singles=(
        Module("x_embedder", "hidden", "latent", aliases=("all_x_embedder.2-1",)),
        Module("final_layer.linear", "latent", "hidden", aliases=("all_final_layer.2-1.linear",)),
        Module("final_layer.adaLN_modulation.1", "hidden", "condition",
               aliases=("all_final_layer.2-1.adaLN_modulation.1",)),
        Module("cap_embedder.0", "text", None),
        Module("cap_embedder.1", "hidden", "text"),
        Module("t_embedder.mlp.0", "time_hidden", "time"),
        Module("t_embedder.mlp.2", "condition", "time_hidden"),
    ),
    # Lumina 2, which it grew out of, has the same blocks, but its modulation is number 1.
    marks=re.compile(r"(layers|refiner)[._]\d+[._](attention[._]to_|adaLN_modulation[._]0)|all_(x_emb|final)"),
)
