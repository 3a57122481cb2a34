"""nunchaku's CUDA kernels in float, for a CPU: the quantized product is that of a dense weight kept beside ``qweight``.

What is real around them stays real: packing, padding to 256 tokens, the fused norm and the rotary
table. Formulas from nunchaku's documentation of its ops: y = x W^T + (x down^T) up^T + bias, then for
a fused qkv layer RMS norm and rotation of each head of q and k.
"""

import torch

HEAD = 128


def unpack_rotary(table):
    """The rows [tokens, head / 2, (sin, cos)] that nunchaku's ``pack_rotemb`` has laid out in fragments of 16 x 8."""
    rows, width = table.shape[-2:]
    fragments = table.reshape(rows // 16, width // 8, 8, 4, 2, 2).permute(0, 1, 4, 2, 3, 5)
    return fragments.reshape(rows // 16, width // 8, 16, 8).permute(0, 2, 1, 3).reshape(rows, width // 2, 2)


class Kernels:
    """Install with ``Kernels().install()``; ``fill(layer, generator)`` gives a quantized layer a dense weight."""

    def __init__(self):
        from nunchaku.lora.flux.nunchaku_converter import unpack_lowrank_weight

        self.unpack = unpack_lowrank_weight
        self.dense, self.inputs = {}, {}

    def install(self):
        from nunchaku._C import ops

        ops.quantize_w4a4_act_fuse_lora, ops.gemm_w4a4 = self.quantize, self.gemm
        return self

    def fill(self, layer, generator):
        shape = (layer.out_features, layer.in_features)
        self.dense[layer.qweight.data_ptr()] = torch.randn(shape, generator=generator) / layer.in_features**0.5
        for part in (layer.proj_down, layer.proj_up):
            part.data.zero_()
        layer.smooth_factor.data.fill_(1)

    def quantize(self, x, output, oscales, lora_down, lora_act_out, smooth, fuse_glu, fp4):
        self.inputs[output.data_ptr()] = x.float()
        lora_act_out.zero_()
        lora_act_out[: len(x)] = x.float() @ self.unpack(lora_down, down=True).float().T

    def gemm(self, act, wgt, out, qout, ascales, wscales, oscales, poolout, lora_act_in, lora_up, lora_down,
             lora_act_out, norm_q, norm_k, rotary_emb, bias, *rest):
        x = self.inputs[act.data_ptr()]
        y = x @ self.dense[wgt.data_ptr()].T + lora_act_in[: len(x)] @ self.unpack(lora_up, down=False).float().T
        y = y if bias is None else y + bias.float()
        out[: len(x)] = (y if rotary_emb is None else positioned(y, norm_q, norm_k, rotary_emb)).to(out.dtype)


def positioned(qkv, norm_q, norm_k, rotary_emb):
    """``qkv`` [tokens, 3 * width]: each head of q and k normalised and rotated by the row of its token."""
    tokens = len(qkv)
    rows = unpack_rotary(rotary_emb)
    if len(rows) < -(-tokens // 256) * 256:
        raise AssertionError(f"the kernel wants a rotary row for each of {tokens} tokens and got {len(rows)}")
    q, k, v = (part.reshape(tokens, -1, HEAD) for part in qkv.chunk(3, dim=1))
    sin, cos = rows[:tokens, None].unbind(-1)
    turned = []
    for part, weight in ((q, norm_q), (k, norm_k)):
        normed = torch.nn.functional.rms_norm(part, (HEAD,), weight.float(), 1e-6)
        first, second = normed.unflatten(-1, (-1, 2)).unbind(-1)
        turned.append(torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2))
    return torch.cat([part.reshape(tokens, -1) for part in (*turned, v)], dim=1)
