"""How much each layer of a file changes: norms through Gram matrices, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain, compress
from typing import NamedTuple

import torch

from .. import adapters, lowrank
from ..adapters import Adapter
from ..errors import LoraError, NonFiniteError
from ..keys import Role
from ..layer import Layer
from ..progress import Progress, Steps
from ..source import FileSource
from .gram import BLOCK, PAIR, Workspace, add_gram, inner_product
from .readahead import Readahead
from .survey import LayerFacts, Survey
from .workers import bfloat16_products, workers

#: Squares of norms beyond this cannot be added up. Those of float32 that are smaller may have lost some of their parts.
_LARGEST, _SMALLEST = 1e150, 1e-30

#: Tags of dtypes whose numbers are bfloat16 numbers too, and the rank from which to multiply them as such is quicker.
_SHORT, _FEW = frozenset({"BF16", "F8_E4M3", "F8_E5M2"}), 64

#: Layers that a thread takes at a time: to wake it takes as long as a small layer.
_RUN = 8

_BASE = "depends on the base weight"
_DORA = "without DoRA's magnitude, whose effect depends on the base weight"


def measure(survey: Survey, progress: Progress | None = None) -> Survey:
    """Fill in the norms of ``survey.layers``; ``progress`` is called with (layers done, layers in all).

    A layer that composing would refuse (NaN, Inf) has no norm; it is named in ``survey.problems``. For the time of
    the call, products of float32 matrices on the CPU may be those of :func:`workers.bfloat16_products`.
    """
    space, ahead, problems = Workspace(), Readahead(survey.reader), {}
    with workers() as spread, Steps(f"norms of {survey.name}", len(survey.layers), progress) as steps:
        for layers, products in _groups(survey):
            runs = [layers[start:start + _RUN] for start in range(0, len(layers), _RUN)]
            with products():
                answers = spread(lambda run: [_answer(layer, survey.reader, ahead, space) for layer in run], runs)
                for layer, (norms, note, problem) in zip(layers, chain.from_iterable(answers)):
                    _note(layer.facts, norms, note)
                    problems[layer.number] = problem
                    steps.step()
    survey.problems += [problems[number] for number in sorted(problems) if problems[number]]
    survey.measured = True
    return survey


class _Layer(NamedTuple):
    """One of ``survey.layers``: its place there, and where its data begins in the file."""

    number: int
    facts: LayerFacts
    adapter: Adapter
    begin: int


def _groups(survey: Survey):
    """(layers in the order of their data, in what products) of those whose factors are bfloat16, then of the others."""
    entries = survey.reader.entries
    layers = [_Layer(number, facts, adapter, min(entries[key].begin for key in adapter.keys.values()))
              for number, (facts, adapter) in enumerate(zip(survey.layers, survey.file.layers.values()))]
    layers.sort(key=lambda layer: layer.begin)
    short = [_in_bfloat16(layer.adapter, entries) for layer in layers]
    yield list(compress(layers, short)), bfloat16_products
    yield [layer for layer, chosen in zip(layers, short) if not chosen], nullcontext


def _in_bfloat16(adapter: Adapter, entries) -> bool:
    """Whether only factors that bfloat16 holds are multiplied, in matrices for which that is quicker."""
    return _by_factors(adapter) and adapter.rank >= _FEW and all(
        entries[adapter.keys[role]].dtype in _SHORT for role in (Role.down, Role.up))


def _note(facts: LayerFacts, norms: list[float | None], note: str) -> None:
    facts.spot_norms, facts.note = norms, note
    facts.norm = None if None in norms else math.sqrt(sum(norm * norm for norm in norms))


def _answer(layer: _Layer, reader: FileSource, ahead: Readahead,
            space: Workspace) -> tuple[list[float | None], str, str]:
    """(norm of each cell, what is to be said of them, what composing would refuse)."""
    _, facts, adapter, begin = layer
    ahead.at(begin)
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
    if _by_factors(adapter):
        return _of_factors(adapter, reader, parts, space), note
    if adapter.kind == "diff":
        return _of_matrix(adapter, reader, parts, space), note
    if adapter.kind == "bias":
        return [0.0] * parts, "changes the bias only"
    delta = adapter.delta()
    if delta.rebase is not None or delta.replace is not None:
        return [None] * parts, _BASE
    change = delta.terms if delta.dense is None else lowrank.cheapest(delta.dense)
    return ([lowrank.norm(change)] if parts == 1 else _by_rows(change, adapter.shape[0], parts)), note


def _by_factors(adapter: Adapter) -> bool:
    return adapter.kind == "lora" and not lowrank.rows_pay(adapter.shape, adapter.rank)


def _without_magnitude(adapter: Adapter) -> Adapter:
    keys = {role: key for role, key in adapter.keys.items() if role is not Role.dora}
    layer = adapter.layer
    return adapters.from_layer(Layer(layer.target, keys, layer.source, layer.stem, layer.rules))


def _of_factors(adapter: Adapter, reader: FileSource, parts: int, space: Workspace) -> list[float]:
    """Norms of ``scale * up_p @ down`` for the row blocks up_p of up: in float32, or in float64 where the squares leave
    its range."""
    energies = _of_pair(adapter, reader, parts, space) or _energies(adapter, reader, parts, torch.float32, space)
    if not all(_SMALLEST < energy < math.inf for energy in energies):
        energies = _energies(adapter, reader, parts, torch.float64, space)
    if not all(map(math.isfinite, energies)):
        raise _blame(adapter, (Role.down, Role.up))
    return [abs(adapter.scale) * math.sqrt(max(energy, 0.0)) for energy in energies]


def _of_pair(adapter: Adapter, reader: FileSource, parts: int, space: Workspace) -> list[float] | None:
    """:func:`_energies` in float32 of a small layer whose factors have the same dtype; None of another one."""
    (out, inp), rank, keys = adapter.shape, adapter.rank, (adapter.keys[Role.down], adapter.keys[Role.up])
    dtype, other = map(reader.dtype, keys)
    if dtype != other or rank * (out + inp) > PAIR:
        return None
    pair = space.pair((rank, inp), (out, rank), parts, dtype)
    reader.read(keys, pair.raw)
    return pair.energies()


def _energies(adapter: Adapter, reader: FileSource, parts: int, dtype: torch.dtype, space: Workspace) -> list[float]:
    """Square of the norm of each up_p @ down; products are formed in ``dtype``."""
    rank, out, found = adapter.rank, adapter.shape[0], []
    inner = torch.zeros(rank, rank, dtype=dtype)
    for whole in _row_blocks(reader, adapter.keys[Role.down], 0, rank, space, rank):
        add_gram(inner, whole.T, space)
    for part in range(parts):
        outer = torch.zeros(rank, rank, dtype=dtype)
        for block in _row_blocks(reader, adapter.keys[Role.up], part * out // parts, (part + 1) * out // parts, space):
            add_gram(outer, block, space)
        # ||U D||^2 = trace(D^T U^T U D) = sum of (U^T U) * (D D^T)
        found.append(inner_product(outer, inner))
    return found


def _row_blocks(reader: FileSource, key: str, start: int, stop: int, space: Workspace,
                height: int = 0) -> Iterator[torch.Tensor]:
    """Rows [start, stop) of a tensor, ``height`` or as many as pay at a time; void when the next ones are asked for."""
    entry, dtype = reader.entries[key], reader.dtype(key)
    columns = math.prod(entry.shape[1:])
    step = height or max(1, BLOCK // (columns * dtype.itemsize))
    for first in range(start, stop, step):
        last = min(first + step, stop)
        raw, block = space.stored((last - first, columns), dtype)
        reader.read_rows(key, first, last, raw)
        yield block


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


def _by_rows(change, rows: int, parts: int) -> list[float]:
    """Norms of the row blocks of terms or of a structured change."""
    height = rows // parts
    if isinstance(change, tuple) and lowrank.rows_pay(change[0].shape, sum(term.rank for term in change)):
        change = lowrank.to_dense(change)
        return [math.sqrt(_energy(change[start:start + height])) for start in range(0, rows, height)]
    if isinstance(change, tuple):
        up, down = lowrank.stack(change)
        inner, outer = (down @ down.T).double(), (block.T @ block for block in up.split(height))
        return [math.sqrt(max((gram.double() * inner).sum().item(), 0.0)) for gram in outer]
    return [math.sqrt(sum(_energy(change.rows(first, min(first + lowrank.BLOCK, start + height)))
                          for first in range(start, start + height, lowrank.BLOCK)))
            for start in range(0, rows, height)]


def _energy(block: torch.Tensor) -> float:
    if block.element_size() == 1:
        # torch knows no sums of fp8.
        block = block.bfloat16()
    return torch.linalg.vector_norm(block, dtype=torch.float64).item() ** 2
