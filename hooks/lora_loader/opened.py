"""The LoRA behind a dict of tensors: opened once, as long as anybody uses it, and named after its file."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from qpatch.lora.files import LoraFile, open_lora

#: Tensor -> name of the file it was read from. Weak: it knows only tensors that somebody else keeps.
_read_from = WeakIdKeyDictionary()
#: First tensor of a dict -> what was opened from that dict.
_known = WeakIdKeyDictionary()


class _Record(NamedTuple):
    """An opened LoRA and what it was opened from, none of it kept alive."""

    family: str
    tensors: dict[str, weakref.ref]
    file: weakref.ref

    def is_of(self, tensors: Mapping[str, torch.Tensor], family: str) -> bool:
        return (self.family == family and self.tensors.keys() == tensors.keys()
                and all(self.tensors[key]() is tensor for key, tensor in tensors.items()))


def remember(tensors: Mapping[str, torch.Tensor], name: str) -> None:
    """Note that ``tensors`` came from the file ``name``."""
    for tensor in tensors.values():
        if isinstance(tensor, torch.Tensor):
            _read_from[tensor] = name


def name_of(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The file that the tensors came from, if one of them is known; a node may have added or dropped others."""
    for tensor in tensors.values():
        if isinstance(tensor, torch.Tensor) and tensor in _read_from:
            return _read_from[tensor]
    return None


def _open(tensors: Mapping[str, torch.Tensor], family, name: str) -> LoraFile:
    """The opened LoRA; the same object for the same tensors, while it is in use.

    So a node that runs again with another strength means the same LoRA, and what was composed from it is
    only rescaled.
    """
    first = next((tensor for tensor in tensors.values() if isinstance(tensor, torch.Tensor)), None)
    record = _known.get(first) if first is not None else None
    file = record.file() if record is not None and record.is_of(tensors, family.name) else None
    if file is None:
        file = open_lora(tensors, name=name, family=family)
        refs = {key: weakref.ref(tensor) for key, tensor in tensors.items()}
        _known[first] = _Record(family.name, refs, weakref.ref(file))
    return file


class Lora:
    """A LoRA in memory, opened when it is first asked for."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], family, name: str):
        self.tensors, self.family, self.name = tensors, family, name
        self._file: LoraFile | None = None

    @property
    def file(self) -> LoraFile:
        """The opened LoRA; raises :class:`qpatch.lora.errors.LoraError`."""
        if self._file is None:
            self._file = _open(self.tensors, self.family, self.name)
        return self._file

    def grow(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Take ``tensors`` in as well, if this is a LoRA that comes in pieces and lacks them; whether it did."""
        return False

    def copy(self) -> Lora:
        """What the clone of a patcher gets: the same LoRA."""
        return self

    def __repr__(self):
        return f"<LoRA {self.name}>"


class Pieces(Lora):
    """A LoRA that a node hands over layer by layer."""

    def grow(self, tensors):
        if self.tensors.keys() & tensors.keys():
            return False
        self.tensors.update(tensors)
        self._file = None
        return True

    def copy(self):
        twin = Pieces(dict(self.tensors), self.family, self.name)
        # Until one of them grows they mean the same, and composing the one serves the other.
        twin._file = self._file
        return twin


def lora(tensors: Mapping[str, torch.Tensor], family, fallback: str) -> Lora:
    """The LoRA that ``tensors`` holds for ``family``, called after its file, or ``fallback``."""
    # A dict of our own: what the caller does with its dict later does not reach the LoRA.
    return Lora(dict(tensors), family, name_of(tensors) or fallback)
