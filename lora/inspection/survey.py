"""A LoRA file seen through its header: its layers and what they are, without their data and without torch."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

from ..adapters import Adapter
from ..errors import LoraError
from ..families import Family
from ..files import LoraFile, open_lora
from ..keys import Role, Target
from ..source import FileSource
from .layout import Layout, Spot
from .metadata import About, about
from .trainer import Maker, maker


@dataclass
class LayerFacts:
    """One source layer of a file.

    ``kind``, ``rank``, ``alpha``, ``scale``, ``shape``: as its adapter has them. ``dora``: its rows or columns
    are scaled to a learned length. ``spots``: the cells of the family's map that it covers.

    Set by :func:`measure`: ``norm``, Frobenius norm of the change at strength 1, or None where that depends on the
    base weight or cannot be told; ``spot_norms``, the same for each of ``spots``; ``note``, what is to be said of them.
    """

    target: Target
    kind: str
    rank: int | None
    alpha: float | None
    scale: float | None
    rule: str
    shape: tuple[int, ...] | None
    dtypes: tuple[str, ...]
    dora: bool
    spots: list[Spot]
    norm: float | None = None
    spot_norms: list[float | None] = field(default_factory=list)
    note: str = ""

    def rms(self, index: int) -> float | None:
        """Root mean square of the change of ``spots[index]``, per element of the weight: comparable between layers."""
        norm = self.spot_norms[index] if self.spot_norms else None
        if norm is None or self.shape is None:
            return None
        elements = 1
        for extent in self.shape:
            elements *= extent
        return norm / (elements / len(self.spots)) ** 0.5


@dataclass
class Survey:
    """What is in one file. ``measured``: whether the norms are there too. ``problems``: what composing would refuse."""

    path: str
    name: str
    size: int
    tensors: int
    family: Family | None
    layout: Layout | None
    maker: Maker
    about: About
    layers: list[LayerFacts]
    skipped: list[tuple[str, str]]
    unknown: list[tuple[str, str]]
    text_encoder_keys: list[str]
    dtypes: Counter
    file: LoraFile
    reader: FileSource
    measured: bool = False
    problems: list[str] = field(default_factory=list)


def survey(path: str | os.PathLike, family: str | Family | None = None) -> Survey:
    """Read the header of the safetensors file at ``path`` and sort its keys into layers.

    ``family``: what the file is for; by default told from its keys. Raises :class:`LoraError` for a file that is
    no LoRA of a known family. The result keeps the file open for :func:`measure`; ``survey.reader.close()`` ends that.
    """
    reader = FileSource(path)
    try:
        file = open_lora(reader, family=family)
        return _survey(os.fspath(path), reader, file)
    except LoraError:
        reader.close()
        raise


def _survey(path: str, reader: FileSource, file: LoraFile) -> Survey:
    layout = None if file.family is None else Layout(file.family)
    entries = reader.entries
    return Survey(
        path=path, name=file.name, size=reader.size, tensors=len(entries), family=file.family, layout=layout,
        maker=maker(file.metadata, entries), about=about(file.metadata),
        layers=[_facts(adapter, layout, reader) for adapter in file.layers.values()],
        skipped=file.skipped, unknown=file.unknown, text_encoder_keys=file.text_encoder_keys,
        dtypes=Counter(entry.dtype for key, entry in entries.items() if not key.endswith(".alpha")),
        file=file, reader=reader,
    )


def _facts(adapter: Adapter, layout: Layout, reader: FileSource) -> LayerFacts:
    dtypes = {reader.entries[key].dtype for role, key in adapter.keys.items() if role not in (Role.alpha, Role.scale)}
    try:
        alpha, scale, rule = adapter.alpha, adapter.scale, adapter.scale_note
    except LoraError as error:
        alpha, scale, rule = None, None, error.problem
    return LayerFacts(
        adapter.target, adapter.kind, adapter.rank, alpha, scale, rule, adapter.shape, tuple(sorted(dtypes)),
        Role.dora in adapter.keys, layout.spots(adapter.target),
    )
