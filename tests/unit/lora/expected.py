"""What composing a synthetic file should do to each module of a tree of trees.py: dense float64, written independently.

Where a source layer lives is spelled out here a second time: module, rows, order.
"""

from __future__ import annotations

import numpy as np
import stored_weights
import torch
import trees

#: Module inside a block -> parts of its rows, in order.
ROWS = {
    "attn.to_qkv": ("q", "k", "v"), "attn.add_qkv_proj": ("q", "k", "v"),
    "attention.qkv": ("q", "k", "v"), "feed_forward.w13": ("w3", "w1"),
}


def rows_of(target: str, out: int) -> slice:
    """The rows of a fused module with ``out`` rows that a target such as "layers.0.attention.qkv[k]" means."""
    name, _, part = target.partition("[")
    if not part:
        return slice(0, out)
    parts = next(parts for module, parts in ROWS.items() if name.endswith(module))
    height = out // len(parts)
    start = parts.index(part.rstrip("]")) * height
    return slice(start, start + height)


def module_of(root, target: str):
    return root.get_submodule(target.partition("[")[0])


def weight_of(module) -> torch.Tensor:
    """The base weight, rows in the order of the original layer, float64."""
    if hasattr(module, "proj_down"):
        return stored_weights.svdq_weight(module)
    if hasattr(module, "wzeros"):
        return stored_weights.planar(stored_weights.awq_weight(module))
    return module.weight.detach().double()


def bias_of(module) -> torch.Tensor | None:
    """The bias, in the order of the original layer, float64."""
    if module.bias is None:
        return None
    if hasattr(module, "proj_down"):
        return trees.plain_bias(module.bias)
    if hasattr(module, "wzeros"):
        chunks = stored_weights.planar(module.bias.detach().double()[:, None]).view(6, -1).clone()
        # The ones of 1 + scale are in the stored bias, and not in that of the original layer.
        chunks[[1, 4]] -= 1
        return chunks.flatten()
    return module.bias.detach().double()


def low_rank_of(module) -> torch.Tensor | None:
    """What the branch of a module adds to its weight, rows in the order of the original; None for a plain weight."""
    if hasattr(module, "proj_down"):
        return trees.effective(module)
    if hasattr(module, "wzeros"):
        up, down = getattr(module, "qpatch_lora_up", None), getattr(module, "qpatch_lora_down", None)
        if up is None:
            return torch.zeros(module.wscales.shape[1], module.qweight.shape[1] * 2, dtype=torch.float64)
        return stored_weights.planar(up.double() @ down.double())
    return None


def changes(example, root, strength: float, bases: dict | None = None):
    """target module -> (change of the weight, change of the bias or None), of one producers.Example."""
    found: dict = {}
    for target, sample in example.layers.items():
        module = module_of(root, target)
        base, bias = weight_of(module), bias_of(module)
        rows = rows_of(target, len(base))
        nothing = torch.zeros_like(base), torch.zeros(len(base)).double()
        weight_change, bias_change = found.setdefault(target.partition("[")[0], nothing)
        if sample.change is not None:
            weight_change[rows] += torch.from_numpy(np.asarray(sample.change(base[rows].numpy(), strength)))
        if sample.bias is not None and bias is not None:
            bias_change[rows] += torch.from_numpy(np.asarray(sample.bias(bias[rows].numpy(), strength)))
    return found


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    size = wanted.norm().item()
    return (found - wanted).norm().item() / size if size else found.norm().item()
