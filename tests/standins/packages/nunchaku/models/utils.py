"""Stand-in for nunchaku's helpers: one Linear of several, without their weights."""

from torch import nn


def fuse_linears(linears):
    assert len(linears) > 0
    if len(linears) == 1:
        return linears[0]
    first = linears[0]
    assert all(linear.in_features == first.in_features for linear in linears)
    return nn.Linear(
        first.in_features,
        sum(linear.out_features for linear in linears),
        bias=all(linear.bias is not None for linear in linears),
        dtype=first.weight.dtype,
        device=first.weight.device,
    )
