"""Whose code says what an adapter does to a weight: ComfyUI's, or that of another pack."""

from __future__ import annotations

#: The package of ComfyUI's adapter classes.
_COMFYUI = "comfy.weight_adapter"
_METHOD = "calculate_weight"


def is_comfyui_s(adapter) -> bool:
    """Whether ``adapter`` does what its ``name`` and ``weights`` say, as far as its class tells.

    A node pack may derive its own from ComfyUI's: one that holds a whole stack of LoRAs, say, and names the
    tensors of the first. What such a class computes is asked of it, not read off its tensors.
    """
    for cls in type(adapter).__mro__:
        if _METHOD in vars(cls):
            return cls.__module__.startswith(_COMFYUI)
    return True
