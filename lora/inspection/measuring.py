"""How much each layer of a file changes: norms through Gram matrices, read block by block, a layer on each core."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from .. import adapters, lowrank
from ..adapters import Adapter
from ..errors import LoraError, NonFiniteError
from ..keys import Role
from ..layer import Layer
from ..progress import Progress, track
from ..source import FileSource
from .gram import BLOCK, Gram, Workspace
from .survey import Survey

#: Squares of norms beyond this cannot be added up.
_LARGEST = 1e150

_BASE = "depends on the base weight"
_DORA = "without DoRA's magnitude, whose effect depends on the base weight"


def measure(survey: Survey, progress: Progress | None = None) -> Survey:
    """Fill in the norms of ``survey.layers``; ``progress`` is called with (layers done, layers in all).

    A layer that composing would refuse (NaN, Inf) has no norm; it is named in ``survey.problems``.
    """
    layers = list(zip(survey.layers, survey.file.layers.values()))
    space = Workspace()
    with _workers() as pool:
        answers = pool.map(lambda layer: _answer(*layer, survey.reader, space), layers)
        for (facts, _), answer in track(zip(layers, answers), len(layers), f"norms of {survey.name}", progress):
            facts.spot_norms, facts.note, problem = answer
            survey.problems += [problem] if problem else []
            known = None not in facts.spot_norms
            facts.norm = math.sqrt(sum(norm * norm for norm in facts.spot_norms)) if known else None
    survey.measured = True
    return survey


@contextmanager
def _workers():
    """A thread for each core, and in it one thread of torch: those of one product wait for each other at each step,
    which takes ten times as long where another program has one of the cores."""
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = ThreadPoolExecutor(min(cores, before), initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def _answer(facts, adapter: Adapter, reader: FileSource, space: Workspace) -> tuple[list[float | None], str, str]:
    """(norm of each cell, what is to be said of them, what composing would refuse)."""
    try:
        norms, note = _norms(adapter, reader, len(facts.spots), space)
        if not all(norm is None or norm < _LARGEST for norm in norms):
            raise _blame(adapter, [role for role in adapter.keys if role not in (Role.alpha, Role.scale)])
        return norms, note, ""
    except LoraError as error:
        return [None] * len(facts.spots), error.problem, str(error)


def _norms(adapter: Adapter, reader: FileSource, parts: int, space: Workspace) -> tuple[list[float | None], str]:
    """Norm of the change of each of ``parts`` equal blocks of rows, and what is to be said of it."""
    note = ""
    if Role.dora in adapter.keys:
        adapter, note = _without_magnitude(adapter), _DORA
    if adapter.kind == "lora" and not lowrank.rows_pay(adapter.shape, adapter.rank):
        return _of_factors(adapter, reader, parts, space), note
    if adapter.kind == "diff":
        return _of_matrix(adapter, reader, parts, space), note
    if adapter.kind == "bias":
        return [0.0] * parts, "changes the bias only"
    delta = adapter.delta()
    if delta.rebase is not None or delta.replace is not None:
        return [None] * parts, _BASE
    change = delta.terms if delta.dense is None else lowrank.cheapest(delta.dense)
    return ([lowrank.norm(change)] if parts == 1 else _by_rows(change, adapter.shape[0], parts, space)), note


def _without_magnitude(adapter: Adapter) -> Adapter:
    keys = {role: key for role, key in adapter.keys.items() if role is not Role.dora}
    layer = adapter.layer
    return adapters.from_layer(Layer(layer.target, keys, layer.source, layer.stem, layer.rules))


def _of_factors(adapter: Adapter, reader: FileSource, parts: int, space: Workspace) -> list[float]:
    """Norms of ``scale * up_p @ down`` for the row blocks up_p of up: in float32, in float64 where that overflows."""
    for dtype in (torch.float32, torch.float64):
        energies = _energies(adapter, reader, parts, dtype, space)
        if all(map(math.isfinite, energies)):
            return [abs(adapter.scale) * math.sqrt(max(energy, 0.0)) for energy in energies]
    raise _blame(adapter, (Role.down, Role.up))


def _energies(adapter: Adapter, reader: FileSource, parts: int, dtype: torch.dtype, space: Workspace) -> list[float]:
    """Square of the norm of each up_p @ down; products are formed in ``dtype``."""
    down, up, out = adapter.keys[Role.down], adapter.keys[Role.up], adapter.shape[0]
    inner, found = Gram(adapter.rank, dtype, space), []
    entry = reader.entries[down]
    inner.add(reader.rows(down, 0, entry.shape[0], space.raw(entry.end - entry.begin)).flatten(1).T)
    for part in range(parts):
        outer = Gram(adapter.rank, dtype, space)
        for block in _row_blocks(reader, up, part * out // parts, (part + 1) * out // parts, space):
            outer.add(block)
        found.append(outer.energy(inner))
    return found


def _row_blocks(reader: FileSource, key: str, start: int, stop: int, space: Workspace):
    """Rows [start, stop) of a tensor, a block at a time, each void when the next is asked for."""
    entry = reader.entries[key]
    width = (entry.end - entry.begin) // max(1, entry.shape[0])
    step = max(1, BLOCK // max(1, width))
    for first in range(start, stop, step):
        last = min(first + step, stop)
        block = reader.rows(key, first, last, space.raw((last - first) * width))
        yield block if block.dim() <= 2 else block.flatten(1)


def _blame(adapter: Adapter, roles) -> LoraError:
    """The error for a change that is not finite: that of the tensor which holds NaN or Inf."""
    try:
        for role in roles:
            adapter.layer.tensor(role)
    except LoraError as error:
        return error
    return adapter.layer.refuse(NonFiniteError, "the product of the factors is not finite")


def _of_matrix(adapter: Adapter, reader: FileSource, parts: int, space: Workspace) -> list[float]:
    """Norms of the row blocks of a full difference, read in pieces."""
    role = Role.diff if Role.diff in adapter.keys else Role.w_norm
    key, rows, found = adapter.keys[role], adapter.shape[0], []
    for part in range(parts):
        energy = 0.0
        for block in _row_blocks(reader, key, part * rows // parts, (part + 1) * rows // parts, space):
            energy += _energy(block)
        if not math.isfinite(energy):
            raise _blame(adapter, [role])
        found.append(math.sqrt(energy))
    return found


def _by_rows(change, rows: int, parts: int, space: Workspace) -> list[float]:
    """Norms of the row blocks of terms or of a structured change."""
    height = rows // parts
    if isinstance(change, tuple) and lowrank.rows_pay(change[0].shape, sum(term.rank for term in change)):
        change = lowrank.to_dense(change)
        return [math.sqrt(_energy(change[start:start + height])) for start in range(0, rows, height)]
    if isinstance(change, tuple):
        up, down = lowrank.stack(change)
        inner = Gram(down.shape[0], down.dtype, space)
        inner.add(down.T)
        found = []
        for start in range(0, rows, height):
            outer = Gram(down.shape[0], up.dtype, space)
            outer.add(up[start:start + height])
            found.append(math.sqrt(max(outer.energy(inner), 0.0)))
        return found
    return [math.sqrt(sum(_energy(change.rows(first, min(first + lowrank.BLOCK, start + height)))
                          for first in range(start, start + height, lowrank.BLOCK)))
            for start in range(0, rows, height)]


def _energy(block: torch.Tensor) -> float:
    if block.element_size() == 1:
        # torch knows no sums of fp8.
        block = block.bfloat16()
    return torch.linalg.vector_norm(block, dtype=torch.float64).item() ** 2
