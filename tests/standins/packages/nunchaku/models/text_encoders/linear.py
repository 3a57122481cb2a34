"""Stand-in for nunchaku's quantized Linear of text encoders; quantization itself is left out."""

import torch
from torch import nn


class W4Linear(nn.Module):
    def __init__(self, in_features, out_features, bias, group_size, dtype, device):
        super().__init__()
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        self.register_buffer("qweight", torch.zeros(out_features // 4, in_features, dtype=torch.int16, device=device))
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    @staticmethod
    def from_linear(linear, group_size, init_only=False, weight=None):
        assert isinstance(linear, nn.Linear)
        weight = linear.weight.data if weight is None else weight.data
        made = W4Linear(linear.in_features, linear.out_features, linear.bias is not None, group_size,
                        weight.dtype, weight.device)
        if not init_only:
            made.qweight.fill_(int(weight.float().abs().sum() > 0))
        return made
