"""Pairs that a sampler switches on and off at each step: an adapter keeps its own, at strength 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .pair import Pair, compose
from .splitting import split

#: Attribute of an adapter. It lives as long as ComfyUI keeps the scheduled patch: until the sampler has finished.
_KEPT = "_qpatch_pairs"


def joined(patches: Sequence[tuple], shape: tuple[int, int], dtype: torch.dtype, device) -> Pair | None:
    """The pair of ``patches`` (``Split.patches`` of a weight [out, in]), with their strengths; None without any."""
    pairs = [(_of_one(patch, shape, dtype, device), patch[0]) for patch in patches]
    if not pairs:
        return None
    if len(pairs) == 1 and pairs[0][1] == 1.0:
        return pairs[0][0]
    return Pair(torch.cat([pair.down for pair, _ in pairs]),
                torch.cat([pair.up * strength for pair, strength in pairs], dim=1))


def _of_one(patch: tuple, shape: tuple[int, int], dtype: torch.dtype, device) -> Pair:
    _, adapter, _, offset, _ = patch
    tensors, kept = vars(adapter).get(_KEPT, (None, {}))
    if tensors is not adapter.weights:
        kept = {}
        setattr(adapter, _KEPT, (adapter.weights, kept))
    where = offset and tuple(offset), shape, dtype, str(device)
    if where not in kept:
        kept[where] = compose(split([(1.0, *patch[1:])], shape).placed, shape, dtype, device)
    return kept[where]
