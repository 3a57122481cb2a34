"""Fused layers cut into their parts, and parts fused into one layer, exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import ShapeError, UnsupportedAdapter
from ..families import Family
from ..keys import Role, Target
from ..layer import CHUNKS
from ..stack import parts_of
from .entries import Entry, fold
from .formats import Format

#: Roles whose tensors have a row for each row of the weight, by kind of adapter.
_ROWS = {
    "lora": (Role.up, Role.up_bias, Role.diff_b),
    "loha": (Role.hada_w1_a, Role.hada_w2_a, Role.diff_b),
    "lokr": (Role.lokr_w1, Role.lokr_w1_a, Role.diff_b),
    "diff": (Role.diff, Role.w_norm, Role.diff_b, Role.b_norm),
    "set_weight": (Role.set_weight, Role.diff_b, Role.b_norm),
    "bias": (Role.diff_b, Role.b_norm),
}


def split(entry: Entry, family: Family) -> list[Entry]:
    """The entries of the parts of a fused layer; parts that it does not change are left out.

    Raises :class:`UnsupportedAdapter` for a kind that cannot be cut.
    """
    targets = parts_of(family, entry.target)
    rows = _ROWS.get(entry.kind, ())
    magnitude = entry.tensors.get(Role.dora)
    if magnitude is not None and magnitude.shape[0] != 1:
        rows = (*rows, Role.dora)
    first = next((entry.tensors[role] for role in rows if role in entry.tensors), None)
    if not rows or any(entry.tensors[role].shape[0] % len(targets) for role in rows if role in entry.tensors):
        raise UnsupportedAdapter(f"{entry.target} is one {entry.kind} for {len(targets)} layers, which cannot be cut;"
                                 " --rank N writes factors")
    found = []
    for number, target in enumerate(targets):
        tensors = {role: _block(tensor, number, len(targets)) if role in rows else tensor
                   for role, tensor in entry.tensors.items()}
        piece = Entry(target, entry.kind, tensors, entry.scale, entry.alpha, rounded=entry.rounded)
        if entry.kind == "lora" and magnitude is None:
            _drop_zero_columns(piece)
        if first is None or _says_something(piece):
            found.append(piece)
    if entry.norm is not None:
        # Of an approximation only the whole is known: it stays with the first part.
        found[0].norm, found[0].error = entry.norm, entry.error
    return found


def is_separable(entry: Entry, parts: int) -> bool:
    """Whether a fused layer is separate factors of its parts written together: each rank belongs to one part."""
    if entry.kind != "lora" or Role.dora in entry.tensors:
        return False
    used = [_block(entry.tensors[Role.up], number, parts).ne(0).any(dim=0) for number in range(parts)]
    return bool((sum(columns.int() for columns in used) <= 1).all())


def _block(tensor: torch.Tensor, number: int, count: int) -> torch.Tensor:
    height = tensor.shape[0] // count
    return tensor[number * height:(number + 1) * height]


def _drop_zero_columns(entry: Entry) -> None:
    """Ranks of a fused layer that belong to another part: their columns of ``up`` are zero here."""
    used = entry.tensors[Role.up].ne(0).any(dim=0)
    if not used.all() and used.any():
        entry.tensors[Role.up] = entry.tensors[Role.up][:, used]
        entry.tensors[Role.down] = entry.tensors[Role.down][used]


def _says_something(entry: Entry) -> bool:
    return entry.kind != "lora" or any(tensor.any() for role, tensor in entry.tensors.items() if role is not Role.down)


def fuse(entries: Sequence[Entry], family: Family, format: Format) -> list[Entry]:
    """Entries of parts as one of their fused module; others as they are, or interleaved where the format has it so.

    ``down`` is that of all parts, one after the other, and ``up`` has a block for each; if all have the very same
    ``down`` it is kept once. Parts that are missing are rows of zeros.
    """
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.target.module, []).append(entry)
    found = []
    for module, group in groups.items():
        if group[0].target.part is not None:
            group = [_fused(Target(module), family, {entry.target.part: entry for entry in group})]
        found += [_interleaved(entry) if format.interleaves(family.module(module).name) else entry for entry in group]
    return found


def _fused(target: Target, family: Family, given: dict[str, Entry]) -> Entry:
    order = [given.get(part.part) for part in parts_of(family, target)]
    factors = [entry for entry in order if entry is not None and entry.kind == "lora"]
    tensors: dict[Role, torch.Tensor] = {}
    result = Entry(target, "lora" if factors else "bias", tensors)
    if factors:
        _check_heights(target, factors)
        if len({entry.scale for entry in factors}) > 1:
            for entry in factors:
                fold(entry)
        result.scale, result.rounded = factors[0].scale, any(entry.rounded for entry in factors)
        tensors[Role.down], tensors[Role.up] = _blocks(order, factors)
        known = [entry.norm for entry in factors if entry.norm is not None]
        if known:
            result.norm = sum(norm * norm for norm in known) ** 0.5
            result.error = sum(entry.error**2 for entry in factors) ** 0.5
    bias = _bias(order)
    if bias is not None:
        tensors[Role.diff_b] = bias
    return result


def _check_heights(target: Target, entries: Sequence[Entry]) -> None:
    sizes = {(entry.tensors[Role.up].shape[0], entry.tensors[Role.down].shape[1]) for entry in entries}
    if len(sizes) > 1:
        found = ", ".join(str(list(size)) for size in sorted(sizes))
        raise ShapeError(f"the parts of {target} have different sizes", found=found)


def _blocks(order, factors):
    """(down, up) of the fused layer."""
    ups = [entry.tensors[Role.up] for entry in factors]
    downs = [entry.tensors[Role.down] for entry in factors]
    height, dtype = ups[0].shape[0], _common([*ups, *downs])
    shared = all(torch.equal(down, downs[0]) for down in downs[1:]) and len(factors) == len(order)
    if shared:
        return downs[0].to(dtype), torch.cat([up.to(dtype) for up in ups])
    fused, column = torch.zeros(height * len(order), sum(up.shape[1] for up in ups), dtype=dtype), 0
    for entry, up in zip(factors, ups):
        row = order.index(entry) * height
        fused[row:row + height, column:column + up.shape[1]] = up
        column += up.shape[1]
    return torch.cat([down.to(dtype) for down in downs]), fused


def _common(tensors) -> torch.dtype:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _bias(order: Sequence[Entry | None]) -> torch.Tensor | None:
    """The changes of the parts' biases one after the other, zeros where a part has none."""
    tensors = [{} if entry is None else entry.tensors for entry in order]
    given = [roles.get(Role.diff_b, roles.get(Role.b_norm)) for roles in tensors]
    present = [bias for bias in given if bias is not None]
    if not present:
        return None
    dtype, height = _common(present), len(present[0])
    return torch.cat([torch.zeros(height, dtype=dtype) if bias is None else bias.to(dtype) for bias in given])


def _interleaved(entry: Entry) -> Entry:
    """Rows j * dim + d of ``up`` at d * 6 + j, as Nunchaku's modulation layers have them. A bias stays as it is."""
    if entry.kind == "lora":
        up = entry.tensors[Role.up]
        if up.shape[0] % CHUNKS:
            raise ShapeError(f"the rows of {entry.target} are not six equal parts", found=list(up.shape))
        entry.tensors[Role.up] = up.unflatten(0, (CHUNKS, -1)).transpose(0, 1).flatten(0, 1)
    return entry
