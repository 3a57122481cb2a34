"""One file per kind of adapter; which kind a layer is follows from the roles of its keys.

To add a kind: a subclass of :class:`Adapter` with its roles, its size check and its change, and its
place in ``KINDS``; its roles go into roles.py, its suffixes into suffixes.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from ..errors import FileError, IncompleteAdapter, UnsupportedAdapter
from ..keys import Role, Target
from ..layer import Layer
from ..rules import Rules
from ..source import DictSource
from .base import Adapter
from .full import Bias, Difference, Replacement
from .glora import GLoRA
from .ia3 import IA3, PeftIA3
from .loha import LoHa
from .lokr import LoKr
from .lora import LoRA
from .oft import BOFT, OFT, InputRotation

__all__ = ["Adapter", "KINDS", "build", "from_layer"]

KINDS: tuple[type[Adapter], ...] = (
    LoRA, LoKr, LoHa, GLoRA, OFT, InputRotation, IA3, PeftIA3, Difference, Replacement,
)

_KIND_OF = {role: kind for kind in KINDS for role in kind.marks}

_CONVOLUTION = "it belongs to a convolution; these models have none"

#: Roles that make a layer impossible to apply, and why.
UNSUPPORTED: dict[Role, str] = {
    **dict.fromkeys((Role.mid, Role.lokr_t1, Role.lokr_t2, Role.hada_t1, Role.hada_t2, Role.glora_bm), _CONVOLUTION),
    Role.reshape_weight: "it makes the layer larger, which a quantized layer cannot be",
    Role.oft_diag: "it means two different things in two early versions of LyCORIS, and the file does not say which",
    Role.tlora: "T-LoRA measures its change from start values that the file does not hold",
}


def from_layer(layer: Layer) -> Adapter:
    """The adapter that the keys of ``layer`` make up.

    Raises :class:`IncompleteAdapter` or :class:`UnsupportedAdapter` for a layer that is to be left out,
    :class:`FileError` or :class:`ShapeError` for one that contradicts itself.
    """
    unsupported, kinds = _sorted(tuple(layer.keys))
    if unsupported is not None:
        raise layer.refuse(UnsupportedAdapter, f"{unsupported}: {UNSUPPORTED[unsupported]}", unsupported)
    if len(kinds) > 1:
        raise layer.refuse(FileError, "the layer holds several adapters: " + ", ".join(kind.kind for kind in kinds))
    for kind in kinds:
        # The two share their key; a fourth dimension is what tells them apart.
        boft = kind is OFT and len(layer.raw_shape(Role.oft_blocks)) == 4
        return (BOFT if boft else kind)(layer)
    if Bias.marks & layer.keys.keys():
        return Bias(layer)
    raise layer.refuse(IncompleteAdapter, f"{', '.join(sorted(layer.keys))} without an adapter")


@lru_cache(maxsize=256)
def _sorted(roles: tuple[Role, ...]) -> tuple[Role | None, list[type[Adapter]]]:
    """(a role that is not supported or None, the kinds that the others mark); few sets of them differ."""
    unsupported = next((role for role in roles if role in UNSUPPORTED), None)
    return unsupported, list(dict.fromkeys(_KIND_OF[role] for role in roles if role in _KIND_OF))


def build(target: Target, tensors: Mapping[Role, object], *, alpha: float | None = None, file: str = "<dict>",
          rules: Rules | None = None) -> Adapter:
    """An adapter from tensors in memory, by role; ``alpha`` as a number may stand in for an alpha tensor."""
    import torch

    named = {str(role): tensor for role, tensor in tensors.items()}
    if alpha is not None:
        named[str(Role.alpha)] = torch.tensor(float(alpha))
    keys = {Role(name): name for name in named}
    return from_layer(Layer(target, keys, DictSource(named, file), rules=rules or Rules()))
