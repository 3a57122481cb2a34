"""A converted or merged LoRA before it is written: tensors, metadata, and what has to be said of it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..errors import FileError, NonFiniteError
from ..families import Family
from ..files import LoraFile
from ..keys import Role, Target
from ..products import inner, part_of_terms
from ..publish import publish
from .entries import Entry
from .formats import Format

#: Squares of norms beyond this cannot be added up.
_LARGEST = 1e150


@dataclass
class Result:
    """``errors``: relative error of each layer that is not exact; ``error``: of all layers together.

    ``rounded``: whether some factors are products that were rounded to float32, which the errors do not count.
    ``left_out``: (key, reason) of what the file holds and the output does not. ``layers``: how many are written.
    """

    family: Family
    format: Format
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    layers: int = 0
    errors: dict[Target, float] = field(default_factory=dict)
    error: float = 0.0
    rounded: bool = False
    left_out: list[tuple[str, str]] = field(default_factory=list)
    text_encoder_keys: int = 0

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def add(self, entry: Entry) -> None:
        """Write an entry down under its keys."""
        format = self.format
        for role, tensor in entry.tensors.items():
            if not torch.isfinite(tensor).all():
                raise NonFiniteError(f"{role} is too large for {tensor.dtype}", key=str(entry.target))
            self._put(format.key(self.family, entry.target, role), tensor)
        alpha = entry.scale * entry.rank if entry.kind == "lora" else entry.alpha
        if entry.kind == "lora" and not math.isfinite(alpha):
            raise NonFiniteError("the scale is too large to be written", key=str(entry.target))
        if alpha is not None and (format.alpha or entry.kind != "lora" or entry.scale != 1):
            single = torch.tensor(alpha, dtype=torch.float32)
            exact = single.item() == alpha or not math.isfinite(alpha)
            self._put(format.key(self.family, entry.target, Role.alpha),
                      single if exact else torch.tensor(alpha, dtype=torch.float64))
        self.layers += 1

    def _put(self, key: str, tensor: torch.Tensor) -> None:
        if key in self.tensors:
            raise FileError("two layers would be written under one key", key=key)
        self.tensors[key] = tensor

    def keep_text_encoders(self, file: LoraFile) -> None:
        """Copy the keys of text encoders as they are."""
        for key in file.text_encoder_keys:
            self._put(key, file.source.tensor(key))
        self.text_encoder_keys += len(file.text_encoder_keys)

    def measure(self, entries: Sequence[Entry]) -> None:
        """Set the errors. Norms of exact layers are only computed where some layer is not exact."""
        self.rounded = any(entry.rounded for entry in entries)
        inexact = [entry for entry in entries if entry.error]
        if not inexact:
            return
        total = 0.0
        for entry in entries:
            if entry.norm is None and entry.kind == "lora":
                part = part_of_terms(entry.terms())
                entry.norm = math.sqrt(max(inner([part], [part]), 0.0))
            if not all(value < _LARGEST for value in (entry.norm or 0.0, entry.error)):
                raise NonFiniteError("the change is too large to be measured", key=str(entry.target))
            total += (entry.norm or 0.0) ** 2
        self.errors = {entry.target: entry.error / entry.norm for entry in inexact if entry.norm}
        self.error = math.sqrt(sum(entry.error**2 for entry in inexact) / total) if total else 0.0


def save(result: Result, out: str | os.PathLike, *, inputs: Sequence[str | os.PathLike], force: bool = False) -> Path:
    """Write the file, whole or not at all; never over one of ``inputs``, over another file only with ``force``.

    Raises ``OSError`` (``FileExistsError`` among them).
    """

    def write(path: Path) -> None:
        # Parts of one tensor would be refused as shared memory.
        tensors = {key: tensor.contiguous().clone() for key, tensor in result.tensors.items()}
        try:
            save_file(tensors, path, result.metadata)
        except SafetensorError as error:
            raise OSError(f"cannot be written: {error}") from error
        except ModuleNotFoundError as error:
            raise OSError(f"safetensors writes files by way of numpy ({error}): pip install numpy") from error

    return publish(out, write, inputs=inputs, force=force)
