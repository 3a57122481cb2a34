"""The weights that this hook is about: matrices that ComfyUI keeps quantized, in layers that multiply by them."""

from __future__ import annotations

from torch import nn

from qpatch.lora.modules.kitchen import quantized

#: ComfyUI's native SVDQuant layout has a low-rank branch of its own.
SVDQ_LAYOUT = "TensorCoreSVDQuantW4A4Layout"


def coarse(module: nn.Module):
    """The QuantizedTensor of a linear layer ``module``, or None if it is no such layer.

    Embeddings, convolutions and banks of experts hold quantized weights too; they do not compute x @ W^T.
    """
    weight = module._parameters.get("weight")
    tensor = None if weight is None else quantized(weight)
    if tensor is None or tensor.dim() != 2 or not hasattr(module, "in_features"):
        return None
    return tensor


def layer_of(model: nn.Module, key: str) -> nn.Module | None:
    """The layer whose coarse weight has the state-dict key ``key``, or None."""
    path, _, name = key.rpartition(".")
    if name != "weight":
        return None
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    return module if coarse(module) is not None else None


def layout(tensor) -> str:
    """The name of the layout in which ``tensor`` holds its numbers; of a rotated one, that of the rotated matrix."""
    from qpatch.hooks.convrot.basis import basis

    found = basis(tensor)
    return tensor._layout_cls if found is None else found.base


def is_svdq(tensor) -> bool:
    """Whether ``tensor`` carries a low-rank branch: [in, rank] and [out, rank], or tiles of 128 rows."""
    return tensor._layout_cls == SVDQ_LAYOUT
