"""ComfyUI's parsed adapters as low-rank terms."""

from __future__ import annotations

import torch

from qpatch.hooks.adapter_class import is_comfyui_s
from qpatch.lora.adapters import build
from qpatch.lora.keys import Role, Target
from qpatch.lora.terms import Delta

#: Name of a ComfyUI adapter class -> what its ``weights`` are, in order.
_ROLES = {
    "lora": (Role.up, Role.down, Role.alpha, Role.mid, Role.dora, Role.reshape_weight),
    "loha": (Role.hada_w1_a, Role.hada_w1_b, Role.alpha, Role.hada_w2_a, Role.hada_w2_b, Role.hada_t1, Role.hada_t2,
             Role.dora),
    "lokr": (Role.lokr_w1, Role.lokr_w2, Role.alpha, Role.lokr_w1_a, Role.lokr_w1_b, Role.lokr_w2_a, Role.lokr_w2_b,
             Role.lokr_t2, Role.dora),
}
#: Roles with which a change depends on the weight it is added to, or on its shape.
_DEPENDS = (Role.dora, Role.reshape_weight)

#: Attribute of an adapter: its Delta, kept as long as the adapter is.
_KEPT = "_qpatch_delta"


def _named(adapter) -> dict | None:
    roles = _ROLES.get(getattr(adapter, "name", None))
    values = getattr(adapter, "weights", None)
    if roles is None or not isinstance(values, (tuple, list)) or len(values) > len(roles):
        return None
    if not is_comfyui_s(adapter):
        return None
    return {role: value for role, value in zip(roles, values) if value is not None}


def foreign(adapter) -> bool:
    """Whether ``adapter`` is of a class of another pack, whose code alone knows what it does."""
    return getattr(adapter, "name", None) in _ROLES and not is_comfyui_s(adapter)


def additive(adapter) -> bool:
    """Whether what ``adapter`` adds is the same whatever weight it is added to."""
    named = _named(adapter)
    return named is not None and not any(role in named for role in _DEPENDS)


def scales(adapter) -> bool:
    """Whether strength 0 leaves the weight as it is; with another shape it would not."""
    named = _named(adapter)
    return named is not None and Role.reshape_weight not in named


def delta(adapter) -> Delta:
    """The change that an additive ``adapter`` makes at strength 1, with its alpha in the terms' scales.

    Raises LoraError where the adapter contradicts itself, holds NaN or Inf, or is one of a convolution.
    """
    kept = vars(adapter).get(_KEPT)
    if kept is not None and kept[0] is adapter.weights:
        return kept[1]
    tensors = {role: torch.as_tensor(value) for role, value in _named(adapter).items()}
    # Its own copy of nothing: the terms of a plain LoRA are views of the adapter's tensors.
    found = build(Target("layer"), tensors, file="a LoRA").delta()
    setattr(adapter, _KEPT, (adapter.weights, found))
    return found
