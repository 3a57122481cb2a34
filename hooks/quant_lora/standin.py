"""A quantized weight with scheduled changes rounded into it, in its layer's place while their hooks are in effect.

ComfyUI would write the changed numbers into the memory of the weight, and the old ones back: a quantized
tensor takes neither. Here the weight stays what it is, and another one stands in for it.
"""

from __future__ import annotations

import torch
from torch import nn

from . import branch, weights

#: Attribute of a module: its own weight, while another one stands in.
_OWN = "qpatch_own_weight"


def made(layer: nn.Module, key: str, patches: list[tuple], original_weights: dict) -> torch.Tensor:
    """The weight of ``layer`` with ``patches`` in it, in its format.

    original_weights: what ComfyUI's ``get_key_patches`` says, for a model that is applied as a LoRA.
    """
    from comfy.lora import calculate_weight
    from comfy.utils import string_to_seed

    dense = weights.coarse(layer).dequantize().float()
    beside = branch.change(layer, dense)
    if beside is not None:
        # A change that looks at the weight is to see it as it acts.
        dense += beside
    dense = calculate_weight(patches, dense, key, original_weights=original_weights)
    if beside is not None:
        dense -= beside
    return layer.set_weight(dense, seed=string_to_seed(key), return_weight=True)


def put(layer: nn.Module, weight: torch.Tensor) -> None:
    """Let ``weight`` stand in for the own weight of ``layer``, in place of any other that does."""
    if not stands(layer):
        # In a tuple, or it would be a second Parameter of the module.
        setattr(layer, _OWN, (layer.weight,))
    layer.weight = nn.Parameter(weight, requires_grad=False)


def stands(layer: nn.Module) -> bool:
    """Whether the weight of ``layer`` is not its own."""
    return _OWN in vars(layer)


def remove(layer: nn.Module) -> None:
    """Give ``layer`` its own weight back, where its stand-in has been moved to."""
    if stands(layer):
        (own,), device = vars(layer).pop(_OWN), layer.weight.device
        layer.weight = own if own.device == device else nn.Parameter(own.to(device=device), requires_grad=False)


def forget(layer: nn.Module) -> None:
    """The weights of the model are ComfyUI's originals again."""
    vars(layer).pop(_OWN, None)
