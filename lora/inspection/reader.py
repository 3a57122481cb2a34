"""A safetensors file read piece by piece: what is not needed any more is not in memory.

Pages of a mapped file count as memory of the process until the system takes them back, so a large
file that is read once from end to end is better read than mapped.
"""

from __future__ import annotations

import os
import struct

import torch

from .. import header
from ..errors import FileError
from ..source import TAGS, FileSource

_TORCH_NAMES = {tag: name for name, tag in TAGS.items()}

#: How one element of a dtype is decoded without torch. bfloat16 is the upper half of a float32.
_STRUCT = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i", "I16": "<h", "I8": "<b", "U8": "<B",
           "BOOL": "<?"}


class Reader(FileSource):
    """A :class:`FileSource` that reads instead of mapping; close it, or use it in a ``with`` statement."""

    def __init__(self, path: str | os.PathLike, name: str | None = None):
        self.path = os.fspath(path)
        self.name = name or os.path.basename(self.path)
        checked = header.read(self.path, self.name)
        self.entries, self.metadata = checked.entries, checked.metadata
        self.size, self._start = checked.size, checked.start
        self._stream = open(self.path, "rb", buffering=0)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def number(self, key: str) -> float:
        """The only element of the tensor under ``key``."""
        entry = self.entries[key]
        raw = self._read(key, entry.begin, entry.end)
        if entry.dtype == "BF16":
            return struct.unpack("<f", bytes(2) + raw)[0]
        if entry.dtype in _STRUCT:
            return float(struct.unpack(_STRUCT[entry.dtype], raw)[0])
        return super().number(key)

    def tensor(self, key: str) -> torch.Tensor:
        """The tensor under ``key``, in memory of its own."""
        return self.rows(key, 0, self.entries[key].shape[0] if self.entries[key].shape else 1)

    def rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of the tensor under ``key``, in memory of their own; of a scalar: itself."""
        entry = self.entries[key]
        rows = entry.shape[0] if entry.shape else 1
        width = (entry.end - entry.begin) // rows if rows else 0
        raw = self._read(key, entry.begin + start * width, entry.begin + stop * width)
        shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
        dtype = getattr(torch, _TORCH_NAMES.get(entry.dtype, ""), None)
        if dtype is None:
            raise FileError("this version of torch has no such dtype", file=self.name, key=key, found=entry.dtype)
        if not raw:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(shape)

    def _read(self, key, begin, end) -> bytearray:
        raw = bytearray(end - begin)
        view, done = memoryview(raw), 0
        try:
            self._stream.seek(self._start + begin)
            while done < len(raw) and (read := self._stream.readinto(view[done:])):
                done += read
        except OSError as error:
            raise FileError(f"cannot be read: {error.strerror or error}", file=self.name, key=key) from error
        if done < len(raw):
            raise FileError("the file has become shorter while it was read", file=self.name, key=key)
        return raw
