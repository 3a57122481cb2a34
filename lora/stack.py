"""Several files with strengths as one change of each source layer, kept as factors: what diff and merge look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from .adapters import Adapter
from .errors import LoraError, UnknownFamily
from .families import Family
from .files import LoraFile
from .keys import Target
from .lowrank import Change, to_dense
from .products import Part, part_of, part_of_terms
from .progress import Progress, track
from .structured import Kronecker, Structured
from .terms import Delta, Term


@dataclass(frozen=True, eq=False)
class RowBlock(Structured):
    """Rows [start, stop) of another structured change."""

    whole: Structured
    start: int
    stop: int
    scale: float = 1.0

    @property
    def shape(self):
        return self.stop - self.start, self.whole.shape[1]

    @property
    def exact_rank(self):
        return self.whole.exact_rank

    def terms(self):
        return tuple(Term(term.up[self.start:self.stop], term.down, term.scale * self.scale)
                     for term in self.whole.terms())

    def rows(self, start, stop):
        return self.scale * self.whole.rows(self.start + start, self.start + stop)


@dataclass
class Layer:
    """The change of one source layer, strengths included.

    ``terms``: the low-rank part. ``dense``: (factor, tensor or Structured) that are added to it. ``bias``: of the bias.
    ``unknown``: why a part of the change cannot be told without the base weight, by file.
    """

    shape: tuple[int, ...] | None = None
    terms: list[Term] = field(default_factory=list)
    dense: list[tuple[float, torch.Tensor | Structured]] = field(default_factory=list)
    bias: torch.Tensor | None = None
    unknown: list[str] = field(default_factory=list)
    adapters: list[tuple[Adapter, float]] = field(default_factory=list)

    def parts(self) -> list[Part]:
        """The change as products.py takes it."""
        found = [part_of(factor, change) for factor, change in self.dense]
        return [part_of_terms(self.terms), *found] if self.terms else found


def layers(files: Sequence[tuple[LoraFile, float]], split: Iterable[str] = (),
           progress: Progress | None = None) -> dict[Target, Layer]:
    """The change of every source layer that the ``files`` touch, each at its strength.

    A fused module comes in its parts if any of the files, or ``split``, has parts of it. Reads all data that it
    returns views of. Raises :class:`UnknownFamily` where the families differ, and what ``Adapter.delta`` raises.
    """
    family = one_family([file for file, _ in files])
    apart = {target.module for file, _ in files for target in file.layers if target.part is not None} | set(split)
    found: dict[Target, Layer] = {}
    wanted = [(target, adapter, strength) for file, strength in files for target, adapter in file.layers.items()]
    for target, adapter, strength in track(wanted, len(wanted), "reading", progress):
        for piece, delta in _pieces(family, target, adapter, target.module in apart):
            _add(found.setdefault(piece, Layer()), adapter, delta, strength, piece)
    return found


def one_family(files: Sequence[LoraFile]) -> Family:
    """The family of all ``files``; raises :class:`UnknownFamily` where there is none, or more than one."""
    families = {}
    for file in files:
        if file.family is None:
            raise UnknownFamily("the file holds nothing but text encoder keys", file=file.name)
        families.setdefault(file.family.name, file)
    if len(families) > 1:
        first, second = list(families.values())[:2]
        raise UnknownFamily(f"the files are for different models: {first.name} is for {first.family.title}",
                            file=second.name, found=second.family.title)
    return files[0].family


def parts_of(family: Family, target: Target) -> list[Target]:
    """The parts of a fused ``target`` in the order of its rows; the target itself if it has none."""
    parts = family.module(target.module).parts if target.part is None else ()
    return [Target(target.module, part) for part, _ in parts] or [target]


def _pieces(family, target, adapter, apart):
    delta = adapter.delta()
    pieces = parts_of(family, target) if apart else [target]
    if len(pieces) == 1:
        yield target, delta
        return
    for number, piece in enumerate(pieces):
        yield piece, rows_of(delta, number, len(pieces))


def rows_of(delta: Delta, number: int, count: int) -> Delta:
    """The change of row block ``number`` of ``count`` equal ones of a fused layer.

    A change that depends on the base weight stays what it is; whoever needs it as factors refuses it.
    """
    if delta.rebase is not None or delta.replace is not None:
        return delta

    def cut(tensor):
        height = tensor.shape[0] // count
        return tensor[number * height:(number + 1) * height]

    dense = delta.dense
    if isinstance(dense, Kronecker) and (w1 := dense.matrices()[0]).shape[0] % count == 0:
        dense = Kronecker(cut(w1), dense.w2, dense.scale)
    elif isinstance(dense, Structured):
        height = dense.shape[0] // count
        dense = RowBlock(dense, number * height, (number + 1) * height)
    elif dense is not None:
        dense = cut(dense)
    return Delta(terms=tuple(Term(cut(term.up), term.down, term.scale) for term in delta.terms), dense=dense,
                 bias=None if delta.bias is None else cut(delta.bias))


def _add(layer: Layer, adapter: Adapter, delta: Delta, strength: float, piece: Target) -> None:
    layer.adapters.append((adapter, strength))
    if delta.rebase is not None or delta.replace is not None:
        layer.unknown.append(f"{adapter.file}: {kind_of(adapter)} depends on the base weight")
        return
    layer.terms += [Term(term.up, term.down, term.scale * strength) for term in delta.terms]
    if delta.dense is not None:
        layer.dense.append((strength, delta.dense))
    shapes = [tuple(part.shape) for part in (*delta.terms, *([] if delta.dense is None else [delta.dense]))]
    for shape in shapes:
        if layer.shape not in (None, shape):
            raise LoraError(f"the files disagree about the size of {piece}", file=adapter.file, key=adapter.key,
                            expected=list(layer.shape), found=list(shape))
        layer.shape = shape
    if delta.bias is not None:
        bias = delta.bias.double() * strength
        layer.bias = bias if layer.bias is None else layer.bias + bias


def kind_of(adapter: Adapter) -> str:
    """What people call this kind of adapter."""
    return "DoRA" if "dora" in adapter.keys else adapter.kind


def as_change(layer: Layer) -> Change:
    """The change as what lowrank.py works on: terms, one structured change, or a dense float32 matrix."""
    if not layer.dense:
        return tuple(layer.terms)
    if len(layer.dense) == 1 and not layer.terms and layer.dense[0][0] == 1.0:
        return layer.dense[0][1]
    total = sum(factor * to_dense(part) for factor, part in layer.dense)
    return total + to_dense(layer.terms) if layer.terms else total
