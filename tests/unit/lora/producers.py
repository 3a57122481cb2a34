"""Synthetic LoRA files, spelled as each trainer or exporter spells them, with dense float64 references.

    example = make("musubi", "z-image", kind="lokr", rank=4, alpha=2.0)
    example.tensors, example.metadata     what is in the file
    example.layers["layers.0.attention.qkv[q]"]     a Sample of dense_reference.py: the change of that source layer
    example.write(path)

The names are tables of their own here: nothing is taken from the package under test.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import dense_reference as dense
import numpy as np
import torch
from dense_reference import Sample
from safetensors.torch import save_file

#: Target -> (diffusers name, ComfyUI name or None where it has none of its own), rows, columns.
QWEN_BLOCK = {
    "attn.to_qkv[q]": ("attn.to_q", None, "h", "h"),
    "attn.to_qkv[k]": ("attn.to_k", None, "h", "h"),
    "attn.to_qkv[v]": ("attn.to_v", None, "h", "h"),
    "attn.add_qkv_proj[q]": ("attn.add_q_proj", None, "h", "h"),
    "attn.add_qkv_proj[k]": ("attn.add_k_proj", None, "h", "h"),
    "attn.add_qkv_proj[v]": ("attn.add_v_proj", None, "h", "h"),
    "attn.to_out.0": ("attn.to_out.0", None, "h", "h"),
    "attn.to_add_out": ("attn.to_add_out", None, "h", "h"),
    "img_mlp.net.0.proj": ("img_mlp.net.0.proj", None, "f", "h"),
    "img_mlp.net.2": ("img_mlp.net.2", None, "h", "f"),
    "txt_mlp.net.0.proj": ("txt_mlp.net.0.proj", None, "f", "h"),
    "txt_mlp.net.2": ("txt_mlp.net.2", None, "h", "f"),
    "img_mod.1": ("img_mod.1", None, "m", "h"),
    "txt_mod.1": ("txt_mod.1", None, "m", "h"),
}
QWEN_SINGLE = {
    "img_in": ("img_in", None, "h", "l"),
    "txt_in": ("txt_in", None, "h", "t"),
    "norm_out.linear": ("norm_out.linear", None, "n", "h"),
    "proj_out": ("proj_out", None, "l", "h"),
    "time_text_embed.timestep_embedder.linear_1": ("time_text_embed.timestep_embedder.linear_1", None, "h", "c"),
    "time_text_embed.timestep_embedder.linear_2": ("time_text_embed.timestep_embedder.linear_2", None, "h", "h"),
}
Z_CORE = {
    "attention.qkv[q]": ("attention.to_q", None, "h", "h"),
    "attention.qkv[k]": ("attention.to_k", None, "h", "h"),
    "attention.qkv[v]": ("attention.to_v", None, "h", "h"),
    "attention.out": ("attention.to_out.0", "attention.out", "h", "h"),
    "feed_forward.w13[w1]": ("feed_forward.w1", "feed_forward.w1", "f", "h"),
    "feed_forward.w13[w3]": ("feed_forward.w3", "feed_forward.w3", "f", "h"),
    "feed_forward.w2": ("feed_forward.w2", "feed_forward.w2", "h", "f"),
}
Z_FUSED = {"attention.qkv": (None, "attention.qkv", "3h", "h")}
Z_MODULATION = {"adaLN_modulation.0": ("adaLN_modulation.0", "adaLN_modulation.0", "m", "c")}
Z_SINGLE = {
    "x_embedder": ("all_x_embedder.2-1", "x_embedder", "h", "l"),
    "final_layer.linear": ("all_final_layer.2-1.linear", "final_layer.linear", "l", "h"),
    "final_layer.adaLN_modulation.1": (
        "all_final_layer.2-1.adaLN_modulation.1", "final_layer.adaLN_modulation.1", "h", "c"),
    "cap_embedder.1": ("cap_embedder.1", "cap_embedder.1", "h", "t"),
    "t_embedder.mlp.0": ("t_embedder.mlp.0", "t_embedder.mlp.0", "e", "c"),
    "t_embedder.mlp.2": ("t_embedder.mlp.2", "t_embedder.mlp.2", "c", "e"),
}

#: Extents of small models: hidden, feed-forward, modulation, latent, text, norm, condition, time embedding.
DIMS = {
    "qwen-image": {"h": 24, "f": 48, "m": 144, "l": 8, "t": 16, "n": 48, "c": 12},
    "z-image": {"h": 24, "f": 40, "m": 96, "l": 8, "t": 16, "c": 12, "e": 20},
}


@dataclass(frozen=True)
class Producer:
    """``style``: D diffusers names, N ComfyUI names; ``flat``: dots as underscores. ``pair``: a row of PAIRS.

    ``alpha``: "tensor", "folded" (sqrt(alpha/rank) in both factors), "metadata", "sqrt" (a flag makes it
    alpha/sqrt(rank)) or "" (rank is meant). ``leaves_out``: targets it does not train.
    """

    prefix: str
    pair: str
    style: str = "D"
    flat: bool = False
    alpha: str = ""
    dora: str = "dora_scale"
    families: tuple[str, ...] = ("qwen-image", "z-image")
    kinds: tuple[str, ...] = ("lora",)
    leaves_out: tuple[str, ...] = ()
    both: bool = False


PAIRS = {
    "a": ("lora_down.weight", "lora_up.weight"),
    "b": ("lora_A.weight", "lora_B.weight"),
    "b default": ("lora_A.default.weight", "lora_B.default.weight"),
    "b named": ("lora_A.lightx2v_t1.weight", "lora_B.lightx2v_t1.weight"),
    "c": ("lora_A", "lora_B"),
    "d": ("lora.down.weight", "lora.up.weight"),
    "e": ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight"),
}
Z_ONLY = ("z-image",)
_MODS = ("img_mod.1", "txt_mod.1", "adaLN_modulation.0")
_LYCORIS = ("lora", "lokr", "lokr_w2_whole", "lokr_both", "lokr_full", "loha", "glora", "glora_old", "dora",
            "dora_columns", "dora_lokr", "oft", "boft", "ia3_rows", "ia3_columns", "diff", "diff_b")

PRODUCERS = {
    "musubi": Producer("lora_unet_", "a", flat=True, alpha="tensor",
                       kinds=("lora", "lora_conv", "lokr", "lokr_full", "loha"), leaves_out=("adaLN_modulation.0",)),
    "musubi other": Producer("diffusion_model.", "b", alpha="folded", kinds=("lora", "lokr", "loha")),
    "musubi comfy": Producer("lora_unet_", "a", "N", flat=True, alpha="tensor", families=Z_ONLY),
    "ai-toolkit": Producer("diffusion_model.", "b", dora="magnitude",
                           kinds=("lora", "lora_bias", "lokr", "lokr_full", "dora", "diff", "diff_b")),
    "ai-toolkit old lokr": Producer("lycoris_", "a", flat=True, alpha="tensor", kinds=("lokr", "lokr_full")),
    "onetrainer legacy": Producer("transformer.", "a", alpha="tensor",
                                  kinds=("lora", "dora_columns", "loha", "lokr", "peft_oft", "peft_oft_shared")),
    "onetrainer diffusers": Producer("transformer.", "b", alpha="folded", dora="lora_magnitude_vector.weight",
                                     kinds=("lora", "dora_flat")),
    "onetrainer kohya": Producer("lora_unet_", "a", flat=True, alpha="tensor"),
    "onetrainer original": Producer("", "b", alpha="tensor"),
    "onetrainer comfy": Producer("diffusion_model.", "b", alpha="tensor"),
    "diffusion-pipe": Producer("diffusion_model.", "b", "N", kinds=("lora", "lokr")),
    "diffsynth": Producer("", "b default",
                          leaves_out=("img_mlp.net.0.proj", "txt_mlp.net.0.proj", "adaLN_modulation.0")),
    "diffsynth pipe": Producer("pipe.dit.", "b default"),
    "simpletuner": Producer("transformer.", "b", alpha="metadata"),
    "simpletuner comfyui": Producer("diffusion_model.", "b", alpha="tensor"),
    "simpletuner lycoris": Producer("lycoris_", "a", flat=True, alpha="tensor", kinds=_LYCORIS),
    "flymyai": Producer("transformer.", "b"),
    "peft": Producer("base_model.model.", "b named", dora="lora_magnitude_vector.default.weight",
                     kinds=("lora", "lora_bias", "dora_flat", "peft_oft", "peft_ia3", "peft_ia3_ffn")),
    "peft nested": Producer("base_model.model.transformer.", "b default", dora="lora_magnitude_vector"),
    "lightning": Producer("", "a", alpha="tensor", leaves_out=_MODS),
    "videox-fun": Producer("lora_unet__", "a", flat=True, alpha="tensor"),
    "kohya fused": Producer("lora_unet_", "a", "N", flat=True, alpha="tensor", families=Z_ONLY),
    "anime-z": Producer("lora_unet_", "a", flat=True, alpha="tensor", families=Z_ONLY, both=True),
    "blissful": Producer("lora_unet_", "a", flat=True, alpha="sqrt", dora="dora_layer.weight",
                         kinds=("lora", "dora_flat"), leaves_out=("adaLN_modulation.0",)),
    "turbo training adapter": Producer("diffusion_model.", "b", families=Z_ONLY),
    "mochi style": Producer("transformer.", "c"),
    "old diffusers": Producer("transformer.", "d"),
    "older diffusers": Producer("transformer.", "e"),
    "comfyui extract": Producer("diffusion_model.", "a", alpha="tensor",
                                kinds=("lora", "diff", "diff_b", "set_weight")),
    "lora_transformer": Producer("lora_transformer_", "a", flat=True, alpha="tensor"),
    "invokeai": Producer("model.diffusion_model.", "b"),
}


@dataclass
class Example:
    """One synthetic file. ``layers``: canonical target as text -> :class:`Sample`; ``shapes``: -> (out, in)."""

    producer: str
    family: str
    kind: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    layers: dict[str, Sample] = field(default_factory=dict)
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def write(self, path) -> Path:
        """Save as safetensors; returns the path."""
        save_file({key: tensor.contiguous() for key, tensor in self.tensors.items()}, path, self.metadata or None)
        return Path(path)

    def base(self, target: str, seed: int = 0) -> np.ndarray:
        """A base weight [out, in], float64, for a source layer."""
        return np.random.default_rng([seed, len(target)]).normal(size=self.shapes[target])


def make(producer: str, family: str, kind: str = "lora", *, rank: int = 4, alpha: float | None = 2.0, blocks: int = 1,
         dims: dict[str, int] | None = None, dtype: torch.dtype = torch.float32, singles: bool = True,
         seed: int = 0) -> Example:
    """A file as ``producer`` writes it for ``family``; raises ``ValueError`` for what it never writes.

    ``alpha`` counts only for producers that have one. ``blocks``: how many of each list of blocks. ``dims``
    replaces entries of DIMS. ``singles``: also modules outside of the blocks (where the producer can).
    """
    rules = PRODUCERS[producer]
    if family not in rules.families or kind not in rules.kinds:
        raise ValueError(f"{producer} writes no {kind} for {family}")
    example, rng = Example(producer, family, kind), np.random.default_rng(seed)
    for target, spelled, out, inp in _modules(rules, family, blocks, {**DIMS[family], **(dims or {})}, singles):
        sample = _sample(rules, kind, rng, out, inp, rank, alpha, dtype)
        for role, tensor in sample.tensors.items():
            example.tensors[f"{spelled}.{_suffix(rules, role)}"] = tensor
        example.layers[target], example.shapes[target] = sample, (out, inp)
    if rules.both:
        _repeat_fused(example, rules, rank, alpha)
    _describe(example, rules, rank, alpha)
    return example


def _modules(rules, family, blocks, dims, singles):
    """(target, module name with prefix, out, in) of everything the producer trains."""
    lists = _qwen() if family == "qwen-image" else _z(rules)
    for block, depth, names in lists:
        for index in range(min(blocks, depth) if block else int(singles)):
            for target, (diffusers, native, out, inp) in names.items():
                if target in rules.leaves_out:
                    continue
                name = (native if rules.style == "N" and native else diffusers)
                lead = f"{block}.{index}." if block else ""
                dotted = lead + name
                spelled = rules.prefix + (dotted.replace(".", "_") if rules.flat else dotted)
                yield lead + target, spelled, _extent(out, dims), _extent(inp, dims)


def _extent(name, dims):
    return 3 * dims["h"] if name == "3h" else dims[name]


def _qwen():
    return ("transformer_blocks", 60, QWEN_BLOCK), ("", 1, QWEN_SINGLE)


def _z(rules):
    core = Z_CORE
    if rules.style == "N":
        core = {**Z_FUSED, **{target: names for target, names in Z_CORE.items() if "qkv" not in target}}
    modulated = {**core, **Z_MODULATION}
    return (("layers", 30, modulated), ("noise_refiner", 2, modulated), ("context_refiner", 2, core), ("", 1, Z_SINGLE))


def _sample(rules, kind, rng, out, inp, rank, alpha, dtype) -> Sample:
    def store(array):
        return torch.from_numpy(np.asarray(array)).to(dtype)

    # Scale alpha / sqrt(rank) is scale (alpha sqrt(rank)) / rank; the file says alpha.
    meant = {"tensor": alpha, "sqrt": alpha and alpha * rank**0.5}.get(rules.alpha)
    sample = dense.KINDS[kind](rng, out, inp, rank, meant, store)
    if rules.alpha == "sqrt":
        sample.tensors["alpha"] = dense.number(alpha)
    if rules.alpha == "folded" and kind == "lora":
        return _fold(sample, alpha, rank, store)
    return sample


def _fold(sample, alpha, rank, store):
    """Both factors times sqrt(alpha / rank), and no alpha: the same change, said differently."""
    root = (alpha / rank) ** 0.5
    down, up = (store(dense.f64(sample.tensors[name]) * root) for name in ("down", "up"))
    return Sample({"down": down, "up": up}, dense.additive(dense.f64(up) @ dense.f64(down)))


def _suffix(rules, role) -> str:
    down, up = PAIRS[rules.pair]
    named = {"down": down, "up": up, "up_bias": up.replace("weight", "bias"), "dora": rules.dora,
             "ia3_weight": "weight", "ia3_on_input": "on_input", "oft_r": "oft_R.weight"}
    if role.startswith("glora_"):
        return f"{role.removeprefix('glora_')}.weight"
    return named.get(role, role)


def _repeat_fused(example, rules, rank, alpha):
    """The same q, k and v once more as one fused layer: rank 3r, block-diagonal up, alpha times 3."""
    for target in [target for target in example.layers if target.endswith("qkv[q]")]:
        parts = [example.layers[target.replace("[q]", f"[{part}]")].tensors for part in "qkv"]
        name = rules.prefix + target.removesuffix("[q]").replace(".", "_")
        example.tensors[f"{name}.lora_down.weight"] = torch.cat([part["down"] for part in parts])
        example.tensors[f"{name}.lora_up.weight"] = torch.block_diag(*[part["up"] for part in parts])
        if alpha is not None:
            example.tensors[f"{name}.alpha"] = torch.tensor(3.0 * alpha)


def _describe(example, rules, rank, alpha):
    if rules.alpha == "metadata":
        config = {"transformer.r": rank, "transformer.lora_alpha": alpha, "transformer.use_rslora": False}
        example.metadata["lora_adapter_metadata"] = json.dumps(config)
    if rules.alpha == "sqrt":
        example.tensors["use_rslora_flag"] = torch.tensor(True)
        example.tensors["use_dora_flag"] = torch.tensor("dora" in example.kind)
