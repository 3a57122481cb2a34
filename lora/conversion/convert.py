"""One file in another format, or with a smaller rank."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..errors import LoraError, UnknownFamily, UnsupportedAdapter
from ..files import LoraFile
from ..keys import FLAGS, TEXT_ENCODER, Role
from ..progress import Progress, track
from .entries import Entry, cast, entry_of, fold
from .formats import Format
from .metadata import provenance, update_ranks
from .reshape import fuse, is_separable, split
from .result import Result

_FACTORS = {Role.down, Role.up}


def convert(file: LoraFile, format: Format, *, max_rank: int | None = None, dtype: torch.dtype | None = None,
            drop: bool = False, made_by: str = "qpatch", progress: Progress | None = None) -> Result:
    """The layers of ``file`` in ``format``.

    ``max_rank``  layers of a higher rank, or of none, become their best approximation of that rank.
    ``dtype``     what the factors are rounded to; default: what they are.
    ``drop``      leave out what the format cannot hold, instead of refusing the file.

    What composing leaves out of the file is left out here, and listed in the result. Raises :class:`LoraError`.
    """
    if file.family is None:
        raise UnknownFamily("the file holds nothing but text encoder keys", file=file.name)
    result = Result(file.family, format, left_out=_left_out(file))
    entries: list[Entry] = []
    adapters = list(file.layers.values())
    for adapter in track(adapters, len(adapters), f"converting {file.name}", progress):
        try:
            entries += _pieces(entry_of(adapter, format, max_rank), adapter, file, format)
        except UnsupportedAdapter as error:
            if not drop:
                raise
            result.left_out.append((adapter.key, error.problem))
        except LoraError as error:
            raise error if error.file is not None else error.naming(file.name, adapter.key)
    finish(result, entries, dtype)
    result.keep_text_encoders(file)
    step = {"tool": "convert", "to": format.name, "rank": max_rank, "error": result.error}
    result.metadata = provenance([(file, 1.0)], step, format.name, made_by)
    if max_rank is not None:
        update_ranks(result.metadata, {entry.rank for entry in entries if entry.kind == "lora"})
    return result


def _left_out(file: LoraFile) -> list[tuple[str, str]]:
    entries = [*file.skipped, *file.unknown]
    return [(key, reason) for key, reason in entries if reason != TEXT_ENCODER and key not in FLAGS]


def _pieces(entry: Entry, adapter, file: LoraFile, format: Format) -> list[Entry]:
    """The entry, cut into its parts where the format does not have it as one layer."""
    module = file.family.module(entry.target.module)
    if entry.target.part is not None or not module.parts:
        return [entry]
    if format.keeps(module.name) and not (format.separates and is_separable(entry, len(module.parts))):
        return [entry]
    try:
        return split(entry, file.family)
    except UnsupportedAdapter as error:
        raise UnsupportedAdapter(error.problem, file=file.name, key=adapter.key) from None


def finish(result: Result, entries: list[Entry], dtype: torch.dtype | None) -> None:
    """Fuse, round, measure and write down."""
    if result.format.fuses:
        entries[:] = fuse(entries, result.family, result.format)
    if result.format.diffusers and any(not entry.tensors.keys() <= _FACTORS for entry in entries):
        # diffusers refuses a file that has both alphas and biases or magnitudes.
        for entry in entries:
            fold(entry)
    if dtype is not None:
        for entry in entries:
            cast(entry, dtype)
    if result.format.diffusers and any(entry.scale != 1 for entry in entries):
        # It puts the prefix in front of the names of a file with alphas itself.
        result.format = replace(result.format, prefix="")
    result.measure(entries)
    for entry in entries:
        result.add(entry)
    if not result.layers:
        raise LoraError("nothing is left to be written")

