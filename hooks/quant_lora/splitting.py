"""The patches of one weight, split: low-rank terms that can run beside the product, and what has to be baked.

What ComfyUI applies in order commutes as long as each patch adds a fixed change. A patch that looks at the
weight (DoRA, OFT, a merge's factor, a replaced weight) and all patches before it are therefore baked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from qpatch.lora import lowrank
from qpatch.lora.errors import LoraError
from qpatch.lora.terms import Term

from . import adapters


@dataclass(frozen=True)
class Placed:
    """One term in the rows and columns of the weight that its patch means; ``strength`` is the user's."""

    term: Term
    strength: float
    rows: slice
    columns: slice


@dataclass
class Split:
    """``placed`` and the patches they come from, the patches to bake, and why they are baked.

    ``effective``: all patches but those of strength 0, in their order.
    ``norms``: functions that give the Frobenius norms of the baked changes, as far as they are known (a scheduled
    change is split at each switch, and nobody asks then); ``unknown``: whether one is not.
    """

    effective: list[tuple] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    patches: list[tuple] = field(default_factory=list)
    rest: list[tuple] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    norms: list[Callable[[], float]] = field(default_factory=list)
    unknown: bool = False

    def bake(self, patch: tuple, reason: str, norm: Callable[[], float] | None = None) -> None:
        self.rest.append(patch)
        self.reasons.append(reason)
        if norm is None:
            self.unknown = True
        else:
            self.norms.append(norm)


def split(patches: list[tuple], shape: tuple[int, int]) -> Split:
    """The patches ``[(strength, change, strength_model, offset, function), ...]`` of a weight [out, in]."""
    found = Split([patch for patch in patches if not _idle(patch)])
    first = _first_independent(found.effective)
    for patch in found.effective[:first]:
        found.bake(patch, _dependence(patch[1]))
    for patch in found.effective[first:]:
        _place(found, patch, shape)
    return found


def _dependence(change) -> str:
    if adapters.foreign(change):
        return f"a {type(change).__name__} of another node pack is no LoRA of ComfyUI's own"
    return "it depends on the weight, or a later patch does"


def _idle(patch: tuple) -> bool:
    """Whether ``patch`` changes nothing. Baked, it would: NVFP4 is not the same after rounding again."""
    strength, change, strength_model, _, _ = patch
    if strength != 0 or strength_model != 1.0:
        return False
    # A list is another model's weight, from a merge; both that and what an adapter adds are multiplied by the strength.
    return isinstance(change, list) or _adds(patch) or adapters.scales(change)


def _first_independent(patches: list[tuple]) -> int:
    """How many patches there are up to the last one that depends on the weight as it is by then."""
    return max((index + 1 for index, patch in enumerate(patches) if not _adds(patch)), default=0)


def _adds(patch: tuple) -> bool:
    _, change, strength_model, _, _ = patch
    if strength_model != 1.0:
        return False
    if isinstance(change, tuple):
        kind, values = change if len(change) == 2 else ("diff", change)
        # A padded difference changes the shape of the weight.
        return kind == "diff" and len(values) == 1
    return adapters.additive(change)


def _place(found: Split, patch: tuple, shape: tuple[int, int]) -> None:
    strength, change, _, offset, function = patch
    if isinstance(change, tuple):
        tensor = change[-1][0] if len(change) == 2 else change[0]
        return found.bake(patch, "a full difference", lambda: _norm(tensor, strength))
    if function is not None:
        return found.bake(patch, "its node changes the change by a function of its own")
    try:
        delta = adapters.delta(change)
    except LoraError as error:
        return found.bake(patch, str(error))
    rows, columns = _area(offset, shape)
    if delta.dense is not None or not delta.terms:
        norm = (lambda: lowrank.norm(delta.dense) * abs(strength)) if delta.dense is not None else None
        return found.bake(patch, f"a {change.name} without a small rank", norm)
    size = rows.stop - rows.start, columns.stop - columns.start
    if any(term.shape != size for term in delta.terms):
        return found.bake(patch, f"its shape is {delta.terms[0].shape}, not {size}")
    found.placed += [Placed(term, strength, rows, columns) for term in delta.terms]
    found.patches.append(patch)


def _norm(tensor: torch.Tensor, strength: float) -> float:
    return torch.linalg.vector_norm(tensor.float()).item() * abs(strength)


def _area(offset, shape: tuple[int, int]) -> tuple[slice, slice]:
    """The rows and columns that ComfyUI's ``offset`` (axis, start, length) means; all without one."""
    area = [slice(0, shape[0]), slice(0, shape[1])]
    if offset is not None:
        axis, start, length = offset
        area[axis] = slice(start, start + length)
    return area[0], area[1]
