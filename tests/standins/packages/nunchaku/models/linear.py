"""Stand-in for nunchaku's quantized layers: their parameters, how they are made from a Linear, and their calls."""

import torch
from torch import nn


def _empty(*shape, dtype, device):
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class SVDQW4A4Linear(nn.Module):
    def __init__(self, in_features, out_features, rank=32, bias=True, precision="int4", act_unsigned=False,
                 torch_dtype=torch.bfloat16, device=None):
        super().__init__()
        if precision not in ("int4", "nvfp4"):
            raise ValueError(f"Invalid precision: {precision}")
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.precision, self.torch_dtype, self.act_unsigned = precision, torch_dtype, act_unsigned
        self.group_size = 64 if precision == "int4" else 16
        place = {"dtype": torch_dtype, "device": "cpu" if device is None else device}
        scales = {**place, "dtype": torch_dtype if precision == "int4" else torch.float8_e4m3fn}
        self.qweight = _empty(out_features, in_features // 2, dtype=torch.int8, device=place["device"])
        self.bias = _empty(out_features, **place) if bias else None
        self.wscales = _empty(in_features // self.group_size, out_features, **scales)
        self.smooth_factor = _empty(in_features, **place)
        self.smooth_factor_orig = _empty(in_features, **place)
        self.proj_down = _empty(in_features, rank, **place)
        self.proj_up = _empty(out_features, rank, **place)
        self.wtscale = 1.0 if precision == "nvfp4" else None
        self.wcscales = _empty(out_features, **place) if precision == "nvfp4" else None

    @classmethod
    def from_linear(cls, linear, **kwargs):
        in_features = kwargs.pop("in_features", linear.in_features)
        # Upstream's fault: the default is evaluated even when torch_dtype is given.
        torch_dtype = kwargs.pop("torch_dtype", linear.weight.dtype)
        return cls(in_features=in_features, out_features=linear.out_features, bias=linear.bias is not None,
                   torch_dtype=torch_dtype, device=linear.weight.device, **kwargs)

    def quantize(self, x):
        from .._C import ops

        rows = 256 * -(-x.shape[0] // 256)
        quantized = torch.empty(rows, self.in_features // 2, dtype=torch.uint8)
        hidden = torch.empty(rows, self.proj_down.shape[1])
        ops.quantize_w4a4_act_fuse_lora(x, quantized, None, self.proj_down, hidden, self.smooth_factor, False,
                                        self.precision == "nvfp4")
        return quantized, None, hidden

    def forward_quant(self, quantized, ascales, hidden, output):
        from ..ops.gemm import svdq_gemm_w4a4_cuda

        svdq_gemm_w4a4_cuda(act=quantized, wgt=self.qweight, out=output, ascales=ascales, wscales=self.wscales,
                            lora_act_in=hidden, lora_up=self.proj_up, bias=self.bias, fp4=self.precision == "nvfp4",
                            act_unsigned=self.act_unsigned)
        return output

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        output = torch.empty(flat.shape[0], self.out_features, dtype=x.dtype)
        return self.forward_quant(*self.quantize(flat), output).view(*x.shape[:-1], -1)


class AWQW4A16Linear(nn.Module):
    def __init__(self, in_features, out_features, bias=True, group_size=64, torch_dtype=torch.bfloat16, device=None):
        super().__init__()
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        place = {"dtype": torch_dtype, "device": "cpu" if device is None else device}
        self.qweight = _empty(out_features // 4, in_features // 2, dtype=torch.int32, device=place["device"])
        self.bias = _empty(out_features, **place) if bias else None
        self.wscales = _empty(in_features // group_size, out_features, **place)
        self.wzeros = _empty(in_features // group_size, out_features, **place)

    @classmethod
    def from_linear(cls, linear, group_size=64, torch_dtype=torch.bfloat16, device="cpu", **kwargs):
        return cls(in_features=linear.in_features, out_features=linear.out_features, bias=linear.bias is not None,
                   group_size=group_size, torch_dtype=torch_dtype, device=device)

    def forward(self, x):
        from .._C import ops

        output = ops.gemv_awq(x, self.qweight, self.wscales, self.wzeros, x.shape[0], self.out_features,
                              self.in_features, self.group_size)
        return output if self.bias is None else output.add_(self.bias)
