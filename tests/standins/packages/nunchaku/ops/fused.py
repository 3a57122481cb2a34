"""Stand-in for nunchaku's fused calls: the layers' forward, and with it every forward hook, is passed by."""

import torch

from .gemm import svdq_gemm_w4a4_cuda


def fused_gelu_mlp(x, fc1, fc2):
    flat = x.reshape(-1, x.shape[-1])
    quantized, ascales, hidden = fc1.quantize(flat)
    rows = hidden.shape[0]
    next_act = torch.empty(rows, fc1.out_features // 2, dtype=torch.uint8)
    next_hidden = torch.empty(rows, fc2.proj_down.shape[1])
    svdq_gemm_w4a4_cuda(act=quantized, wgt=fc1.qweight, qout=next_act, lora_act_in=hidden, lora_up=fc1.proj_up,
                        lora_down=fc2.proj_down, lora_act_out=next_hidden, bias=fc1.bias, fp4=fc1.precision == "nvfp4")
    out = torch.empty(flat.shape[0], fc2.out_features, dtype=x.dtype)
    return fc2.forward_quant(next_act, ascales, next_hidden, out).view(*x.shape[:-1], -1)


def fused_qkv_norm_rotary(x, qkv, q_norm_weight, k_norm_weight, packed_rotary):
    flat = x.reshape(-1, x.shape[-1])
    quantized, _, hidden = qkv.quantize(flat)
    out = torch.empty(flat.shape[0], qkv.out_features, dtype=x.dtype)
    svdq_gemm_w4a4_cuda(act=quantized, wgt=qkv.qweight, out=out, lora_act_in=hidden, lora_up=qkv.proj_up, bias=qkv.bias,
                        norm_q=q_norm_weight, norm_k=k_norm_weight, rotary_emb=packed_rotary,
                        fp4=qkv.precision == "nvfp4")
    return out.view(*x.shape[:-1], -1)


def pack_rotary(table):
    """[1, length, 1, width / 2, 2, 2] -> [1, padded length, width] in the kernel's order."""
    pairs = table[0, :, 0, :, 1]
    padded = torch.nn.functional.pad(pairs.flatten(1), (0, 0, 0, -pairs.shape[0] % 256))
    rows, width = padded.shape
    lanes = padded.view(rows // 16, 2, 8, width // 8, 4, 2)
    return lanes.permute(0, 3, 2, 4, 1, 5).reshape(1, rows, width)
