"""How much each layer of a file changes: norms through Gram matrices, read block by block.

||U D||^2 is the sum over (U^T U) * (D D^T), r x r matrices that add up over blocks of rows of U and of columns
of D. So neither the product nor a whole factor has to be in memory.
"""

from __future__ import annotations

import math

import torch

from .. import adapters, lowrank
from ..adapters import Adapter
from ..errors import LoraError, NonFiniteError
from ..keys import Role
from ..layer import Layer
from ..progress import Progress, track
from ..source import FileSource
from .survey import Survey

#: Bytes of a factor that are read at a time: with its float32 copy a block stays in the cache of a core.
BLOCK = 1 << 20

_BASE = "depends on the base weight"
_DORA = "without DoRA's magnitude, whose effect depends on the base weight"


def measure(survey: Survey, progress: Progress | None = None) -> Survey:
    """Fill in the norms of ``survey.layers``; ``progress`` is called with (layers done, layers in all).

    A layer that composing would refuse (NaN, Inf) has no norm; it is named in ``survey.problems``.
    """
    pairs = list(zip(survey.layers, survey.file.layers.values()))
    for facts, adapter in track(pairs, len(pairs), f"norms of {survey.name}", progress):
        try:
            norms, facts.note = _norms(adapter, survey.reader, len(facts.spots))
        except LoraError as error:
            norms, facts.note = [None] * len(facts.spots), error.problem
            survey.problems.append(str(error))
        facts.spot_norms = norms
        facts.norm = None if None in norms else math.sqrt(sum(norm * norm for norm in norms))
    survey.measured = True
    return survey


def _norms(adapter: Adapter, reader: FileSource, parts: int) -> tuple[list[float | None], str]:
    """Norm of the change of each of ``parts`` equal blocks of rows, and what is to be said of it."""
    note = ""
    if Role.dora in adapter.keys:
        adapter, note = _without_magnitude(adapter), _DORA
    if adapter.kind == "lora":
        return _of_factors(adapter, reader, parts), note
    if adapter.kind == "diff":
        return _of_matrix(adapter, reader, parts), note
    if adapter.kind == "bias":
        return [0.0] * parts, "changes the bias only"
    delta = adapter.delta()
    if delta.rebase is not None or delta.replace is not None:
        return [None] * parts, _BASE
    change = delta.terms if delta.dense is None else delta.dense
    return ([lowrank.norm(change)] if parts == 1 else _by_rows(change, adapter.shape[0], parts)), note


def _without_magnitude(adapter: Adapter) -> Adapter:
    keys = {role: key for role, key in adapter.keys.items() if role is not Role.dora}
    layer = adapter.layer
    return adapters.from_layer(Layer(layer.target, keys, layer.source, layer.stem, layer.rules))


def _of_factors(adapter: Adapter, reader: FileSource, parts: int) -> list[float]:
    """Norms of ``scale * up_p @ down`` for the row blocks up_p of up: in float32, in float64 where that overflows."""
    for dtype in (torch.float32, torch.float64):
        energies = _energies(adapter, reader, parts, dtype)
        if all(map(math.isfinite, energies)):
            return [abs(adapter.scale) * math.sqrt(max(energy, 0.0)) for energy in energies]
    raise _blame(adapter, (Role.down, Role.up))


def _energies(adapter: Adapter, reader: FileSource, parts: int, dtype: torch.dtype) -> list[float]:
    """Square of the norm of each up_p @ down; products are formed in ``dtype``."""
    down, up, (out, _) = adapter.keys[Role.down], adapter.keys[Role.up], adapter.shape
    inner = _gram_of_down(reader.tensor(down).flatten(1), dtype)
    cuts = [part * out // parts for part in range(parts + 1)]
    return [(_gram_of_up(reader, up, start, stop, dtype) * inner).sum().item() for start, stop in zip(cuts, cuts[1:])]


def _gram_of_down(down: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """D D^T in float64, D [r, in]."""
    width = max(1, BLOCK // (down.element_size() * down.shape[0]))
    return sum(_square(down[:, start:start + width].T, dtype) for start in range(0, down.shape[1], width))


def _gram_of_up(reader: FileSource, key: str, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """U^T U in float64 of rows [start, stop) of U [out, r]."""
    return sum(_square(block, dtype) for block in _row_blocks(reader, key, start, stop))


def _row_blocks(reader: FileSource, key: str, start: int, stop: int):
    entry = reader.entries[key]
    step = max(1, BLOCK * entry.shape[0] // max(1, entry.end - entry.begin))
    for first in range(start, stop, step):
        block = reader.rows(key, first, min(first + step, stop))
        yield block if block.dim() <= 2 else block.flatten(1)


def _square(block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    working = block if block.dtype == torch.float64 else block.to(dtype)
    return (working.T @ working).double()


def _blame(adapter: Adapter, roles) -> LoraError:
    """The error for a change that is not finite: that of the tensor which holds NaN or Inf."""
    try:
        for role in roles:
            adapter.layer.tensor(role)
    except LoraError as error:
        return error
    return adapter.layer.refuse(NonFiniteError, "the product of the factors is not finite")


def _of_matrix(adapter: Adapter, reader: FileSource, parts: int) -> list[float]:
    """Norms of the row blocks of a full difference, read in pieces."""
    role = Role.diff if Role.diff in adapter.keys else Role.w_norm
    key, rows, found = adapter.keys[role], adapter.shape[0], []
    for part in range(parts):
        energy = 0.0
        for block in _row_blocks(reader, key, part * rows // parts, (part + 1) * rows // parts):
            energy += _energy(block)
        if not math.isfinite(energy):
            raise _blame(adapter, [role])
        found.append(math.sqrt(energy))
    return found


def _by_rows(change, rows: int, parts: int) -> list[float]:
    """Norms of the row blocks of terms or of a structured change."""
    height = rows // parts
    if isinstance(change, tuple):
        up, down = lowrank.stack(change)
        inner = (down @ down.T).double()
        return [math.sqrt(max((_square(up[start:start + height], up.dtype) * inner).sum().item(), 0.0))
                for start in range(0, rows, height)]
    return [math.sqrt(sum(_energy(change.rows(first, min(first + lowrank.BLOCK, start + height)))
                          for first in range(start, start + height, lowrank.BLOCK)))
            for start in range(0, rows, height)]


def _energy(block: torch.Tensor) -> float:
    return torch.linalg.vector_norm(block, dtype=torch.float64).item() ** 2
