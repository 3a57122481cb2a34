"""The dense float64 change of every source layer of an opened file, in numpy: what outputs are compared with."""

import numpy as np
import torch

from qpatch.lora.lowrank import to_dense

PARTS = {"attn.to_qkv": "q k v", "attn.add_qkv_proj": "q k v", "attention.qkv": "q k v", "feed_forward.w13": "w3 w1"}


def dense(delta, base):
    """Change of the weight at strength 1, float64; None if there is none. ``base`` is for what depends on it."""
    if delta.rebase is not None:
        changed = delta.rebase(torch.from_numpy(base).float(), 1.0)
        return to_dense(changed).double().numpy()
    if delta.replace is not None:
        return delta.replace.double().numpy() - base
    if delta.dense is not None:
        return to_dense(delta.dense).double().numpy()
    if not delta.terms:
        return None
    return sum(term.scale * (term.up.double() @ term.down.double()) for term in delta.terms).numpy()


def changes(file, example=None):
    """target -> (change of the weight or None, change of the bias or None), fused layers as their parts."""
    found = {}
    for target, adapter in file.layers.items():
        name, delta = str(target), adapter.delta()
        base = example.base(name) if example is not None and name in example.shapes else None
        weight, bias = dense(delta, base), None if delta.bias is None else delta.bias.double().numpy()
        parts = next((parts.split() for end, parts in PARTS.items() if name.endswith(end)), None)
        for number, part in enumerate(parts or [None]):
            pieces = [None if array is None else array if parts is None else np.split(array, len(parts))[number]
                      for array in (weight, bias)]
            if parts is None or any(piece is not None and piece.any() for piece in pieces):
                found[name if part is None else f"{name}[{part}]"] = tuple(pieces)
    return found


def largest_error(one, two):
    """The largest difference of an element of any layer, relative to the layer's largest."""
    assert set(one) == set(two)
    worst = 0.0
    for target in one:
        for first, second in zip(one[target], two[target]):
            assert (first is None) == (second is None), target
            if first is not None:
                worst = max(worst, np.abs(first - second).max() / max(np.abs(first).max(), 1e-30))
    return worst
