"""Stand-in for nunchaku's quantized layers: their parameters and how they are made from a Linear."""

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
