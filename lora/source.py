"""Where the tensors of a LoRA come from: a safetensors file mapped into memory, or a dict.

Names, shapes and dtypes are known without touching data; a tensor is fetched when asked for,
and one from a file is a view of the mapping (private: writing to it would not reach the file,
and nothing here writes).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

import torch

from . import header
from .errors import FileError
from .header import Entry

#: Name of a dtype in torch -> its tag in a safetensors header.
TAGS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}


@functools.cache
def _dtype(tag: str) -> torch.dtype | None:
    """The dtype of a header's tag; None where this torch has none. Looked up late: a listing needs no torch."""
    return next((getattr(torch, name, None) for name, known in TAGS.items() if known == tag), None)


class FileSource:
    """A safetensors file. Its header is checked in full when it is opened."""

    def __init__(self, path: str | os.PathLike, name: str | None = None):
        self.path = os.fspath(path)
        self.name = name or os.path.basename(self.path)
        checked = header.read(self.path, self.name)
        self.entries: dict[str, Entry] = checked.entries
        self.metadata: dict[str, str] = checked.metadata
        self._size, self._start = checked.size, checked.start

    @functools.cached_property
    def _data(self) -> torch.Tensor:
        """The bytes behind the header. One mapping and slices of it: safetensors' get_tensor takes 28 us a tensor,
        a slice 3 us."""
        try:
            return torch.from_file(self.path, shared=False, size=self._size, dtype=torch.uint8)[self._start:]
        except (RuntimeError, OSError) as error:
            raise FileError(f"cannot be opened: {error}", file=self.name) from error

    def tensor(self, key: str) -> torch.Tensor:
        """The tensor under ``key``, a view of the mapped file (a copy where it does not begin at a whole element)."""
        entry = self.entries[key]
        dtype = _dtype(entry.dtype)
        if dtype is None:
            raise FileError(f"cannot be read: this version of torch has no {entry.dtype}", file=self.name, key=key)
        data = self._data[entry.begin:entry.end]
        if data.storage_offset() % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(entry.shape)

    def number(self, key: str) -> float:
        """The only element of the tensor under ``key``."""
        return float(self.tensor(key).item())


class DictSource:
    """A dict of tensors, as a loader node hands it over. The dict is not copied and not changed."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], name: str | None = None, metadata=None):
        self.name = name or "<dict>"
        self.metadata: dict[str, str] = dict(metadata or {})
        self._tensors = tensors
        self.entries: dict[str, Entry] = {key: self._entry(key, value) for key, value in tensors.items()}

    def _entry(self, key, value):
        if not isinstance(key, str):
            raise FileError("a key is not a text", file=self.name, key=repr(key))
        if not isinstance(value, torch.Tensor):
            raise FileError("the value is not a tensor", file=self.name, key=key, found=type(value).__name__)
        if value.is_meta or value.layout != torch.strided:
            raise FileError("the tensor does not hold its numbers one by one in memory", file=self.name, key=key,
                            expected="a dense tensor", found=f"{value.layout} on device {value.device}")
        return Entry(TAGS.get(str(value.dtype).removeprefix("torch."), str(value.dtype)), tuple(value.shape), 0, 0)

    def tensor(self, key: str) -> torch.Tensor:
        """The tensor under ``key``, the object of the dict itself."""
        return self._tensors[key].detach()

    def number(self, key: str) -> float:
        """The only element of the tensor under ``key``."""
        return float(self.tensor(key).item())


Source = FileSource | DictSource


def open_source(source, name: str | None = None) -> Source:
    """A :class:`FileSource` for a path, a :class:`DictSource` for a mapping; raises :class:`FileError`."""
    if isinstance(source, (FileSource, DictSource)):
        return source
    if isinstance(source, Mapping):
        return DictSource(source, name)
    if isinstance(source, (str, os.PathLike)):
        return FileSource(source, name)
    raise TypeError(f"a LoRA is a path or a dict of tensors, not {type(source).__name__}")
