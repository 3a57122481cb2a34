"""A stack of files as one: factors one after the other, exact, or approximated within a rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import LoraError, UnsupportedAdapter
from ..files import LoraFile
from ..keys import Role, Target
from ..lowrank import to_dense
from ..progress import Progress, track
from ..stack import Layer, as_change, layers, one_family
from ..structured import Structured
from .convert import _left_out, finish
from .entries import Entry, approximated
from .formats import Format
from .metadata import provenance, update_ranks
from .result import Result


def merge(files: Sequence[tuple[LoraFile, float]], format: Format, *, max_rank: int | None = None,
          dtype: torch.dtype | None = None, drop: bool = False, made_by: str = "qpatch",
          progress: Progress | None = None) -> Result:
    """One file that changes what the ``files``, each at its strength, change together.

    Ranks of a layer add up; unequal scales are multiplied into ``up``, in float32 where the dtype cannot hold the
    product. Options as for :func:`convert`. Raises :class:`LoraError`, also where a change depends on the base weight.
    """
    family = one_family([file for file, _ in files])
    if not any(strength for _, strength in files):
        raise LoraError("every strength is 0: there is nothing to merge")
    modules = {target.module for file, _ in files for target in file.layers}
    apart = {module for module in modules if not format.keeps(family.module(module).name)}
    result = Result(family, format, left_out=[entry for file, _ in files for entry in _left_out(file)])
    merged = layers([(file, strength) for file, strength in files if strength], apart)
    entries: list[Entry] = []
    for target, layer in track(list(merged.items()), len(merged), "merging", progress):
        try:
            entries.append(_entry(target, layer, format, max_rank))
        except UnsupportedAdapter as error:
            if not drop:
                raise
            result.left_out.append((error.key, error.problem))
        except LoraError as error:
            adapter, _ = layer.adapters[0]
            raise error if error.file is not None else error.naming(adapter.file, adapter.key)
    finish(result, entries, dtype)
    _text_encoders(result, files)
    step = {"tool": "merge", "to": format.name, "rank": max_rank, "error": result.error}
    result.metadata = provenance(files, step, format.name, made_by)
    update_ranks(result.metadata, {entry.rank for entry in entries if entry.kind == "lora"})
    return result


def _entry(target: Target, layer: Layer, format: Format, max_rank: int | None) -> Entry:
    adapter, _ = layer.adapters[0]
    if layer.unknown:
        raise _refusal(adapter, f"it cannot be merged: {layer.unknown[0]}")
    if layer.shape is None:
        entry = Entry(target, "bias", {})
    elif len(layer.shape) == 2 and (max_rank is not None or not layer.dense):
        entry = approximated(target, as_change(layer), max_rank)
    elif any(isinstance(part, Structured) for _, part in layer.dense):
        raise _refusal(adapter, f"{target} has no small exact rank; --rank N merges its best approximation of rank N")
    else:
        entry = _difference(target, layer)
    entry.rounded = entry.kind == "lora" and any(one.kind != "lora" for one, _ in layer.adapters)
    if layer.bias is not None:
        entry.tensors[Role.diff_b] = layer.bias.float()
    if not format.holds(entry.kind) or format.diffusers and Role.diff_b in entry.tensors:
        raise _refusal(adapter, f"the {format.name} format has no place for changes of biases, norms or whole weights")
    return entry


def _difference(target: Target, layer: Layer) -> Entry:
    """Full differences, and factors beside them, as one difference in float32."""
    total = sum(factor * part.double() for factor, part in layer.dense)
    if layer.terms:
        total = total + to_dense(layer.terms)
    return Entry(target, "diff", {Role.diff: total.float()})


def _refusal(adapter, reason: str) -> LoraError:
    return UnsupportedAdapter(reason, file=adapter.file, key=adapter.key)


def _text_encoders(result: Result, files) -> None:
    """Those of a single file at full strength are kept; sums of them are not this package's business."""
    holding = [(file, strength) for file, strength in files if file.text_encoder_keys]
    if len(holding) == 1 and holding[0][1] == 1:
        result.keep_text_encoders(holding[0][0])
        return
    for file, _ in holding:
        keys = file.text_encoder_keys
        result.left_out.append((keys[0], f"{len(keys)} text encoder keys of {file.name} are not merged"))
