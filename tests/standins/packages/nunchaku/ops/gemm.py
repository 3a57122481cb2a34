"""Stand-in for nunchaku's call of its matrix product: keywords here, positions in the compiled function."""

import math

from .._C import ops

_NAMES = ("act", "wgt", "out", "qout", "ascales", "wscales", "oscales", "poolout", "lora_act_in", "lora_up",
          "lora_down", "lora_act_out", "norm_q", "norm_k", "rotary_emb", "bias", "smooth_factor", "out_vk",
          "out_linearattn", "act_unsigned", "lora_scales", "fuse_silu", "fp4", "alpha", "wcscales", "out_q", "out_k",
          "out_v", "attn_tokens")


def svdq_gemm_w4a4_cuda(**given):
    values = {"act_unsigned": False, "fuse_silu": False, "fp4": False, "attn_tokens": 0, **given}
    values.setdefault("lora_scales", [1.0] * math.ceil(given["lora_up"].shape[1] / 16))
    values["alpha"] = 1.0 if given.get("alpha") is None else given["alpha"]
    ops.gemm_w4a4(*(values.get(name) for name in _NAMES))
