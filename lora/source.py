"""Where the tensors of a LoRA come from: a safetensors file that is read tensor by tensor, or a dict.

Names, shapes and dtypes are known without touching data; a tensor is fetched when asked for. A file is read; it is
mapped only where that is safe (mapping.py).
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch

from . import header, mapping
from .errors import FileError
from .header import Entry

#: Name of a dtype in torch -> its tag in a safetensors header.
TAGS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}

#: How one element of a dtype is decoded without torch. bfloat16 is the upper half of a float32.
_STRUCT = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i", "I16": "<h", "I8": "<b", "U8": "<B",
           "BOOL": "<?"}


@functools.cache
def _dtype(tag: str) -> torch.dtype | None:
    """The dtype of a header's tag; None where this torch has none. Looked up late: a listing needs no torch."""
    return next((getattr(torch, name, None) for name, known in TAGS.items() if known == tag), None)


class FileSource:
    """A safetensors file. Its header is checked in full when it is opened, and the file stays open.

    So what is read belongs to that header also when another file has taken its name; a file that was written to since
    is refused. Close it, use it in a ``with`` statement, or leave it to the end of the object.
    """

    def __init__(self, path: str | os.PathLike, name: str | None = None):
        self.path = os.fspath(path)
        self.name = name or os.path.basename(self.path)
        self._stream = header.opened(self.path, self.name)
        self.close = weakref.finalize(self, self._stream.close)
        self._stamp, self._lock = self._present_stamp(), threading.Lock()
        checked = header.read_from(self._stream, self.name)
        self.entries: dict[str, Entry] = checked.entries
        self.metadata: dict[str, str] = checked.metadata
        self.size, self._start = checked.size, checked.start

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def tensor(self, key: str) -> torch.Tensor:
        """The tensor under ``key``, in memory of its own; within :func:`mapping.allowed` maybe a view of a mapping."""
        entry, dtype = self.entries[key], self.dtype(key)
        data = self._mapped(entry.begin, entry.end, key)
        if data is None or data.storage_offset() % dtype.itemsize:
            size = entry.end - entry.begin
            data = torch.empty(size, dtype=torch.uint8)
            # Not by way of numpy, which torch can do without.
            self._fill((ctypes.c_char * size).from_address(data.data_ptr()), entry.begin, key)
        return data.view(dtype).view(entry.shape)

    def read(self, keys: Sequence[str], memory: memoryview) -> None:
        """Read the tensors under ``keys`` one behind the other into ``memory``, bytes, of which there are as many.

        Those that follow each other in the file, too, are read at once.
        """
        done, begin = 0, self.entries[keys[0]].begin
        for key, following in zip(keys, (*keys[1:], None)):
            end = self.entries[key].end
            if following is None or self.entries[following].begin != end:
                self._fill(memory[done:done + end - begin], begin, key)
                done, begin = done + end - begin, self.entries[following or key].begin

    def read_rows(self, key: str, start: int, stop: int, memory: memoryview) -> None:
        """Read rows [start, stop) of the tensor under ``key`` into ``memory``, bytes, of which there are as many."""
        entry = self.entries[key]
        self._fill(memory, entry.begin + start * (entry.end - entry.begin) // entry.shape[0], key)

    def dtype(self, key: str) -> torch.dtype:
        """The dtype of the tensor under ``key``; raises :class:`FileError` where this torch has none such."""
        dtype = _dtype(self.entries[key].dtype)
        if dtype is None:
            raise FileError(f"cannot be read: this version of torch has no {self.entries[key].dtype}", file=self.name,
                            key=key)
        return dtype

    def number(self, key: str) -> float:
        """The only element of the tensor under ``key``; needs no torch."""
        entry = self.entries[key]
        if entry.dtype != "BF16" and entry.dtype not in _STRUCT:
            return float(self.tensor(key).item())
        raw = bytearray(entry.end - entry.begin)
        self._fill(raw, entry.begin, key)
        if entry.dtype == "BF16":
            return struct.unpack("<f", bytes(2) + raw)[0]
        return float(struct.unpack(_STRUCT[entry.dtype], raw)[0])

    def prefetch(self, begin: int, end: int) -> None:
        """Bytes [begin, end) of the data are wanted soon: let the system fetch them meanwhile, where it can."""
        if hasattr(os, "posix_fadvise"):
            # A file system that takes no advice is as good as one that does not follow it.
            with suppress(OSError, ValueError):
                os.posix_fadvise(self._stream.fileno(), self._start + begin, end - begin, os.POSIX_FADV_WILLNEED)

    def _mapped(self, begin: int, end: int, key: str) -> torch.Tensor | None:
        data = mapping.data_of(self._stream)
        if data is None:
            return None
        self._check_unchanged(key)
        return data[self._start + begin:self._start + end]

    def _fill(self, memory, position: int, key: str) -> None:
        """Read into ``memory`` what begins at ``position`` of the data."""
        view, done = memoryview(memory), 0
        try:
            while done < len(view) and (read := self._read_at(self._start + position + done, view[done:])):
                done += read
        except (OSError, ValueError) as error:
            # ValueError: it was closed.
            problem = getattr(error, "strerror", None) or error
            raise FileError(f"cannot be read: {problem}", file=self.name, key=key) from error
        self._check_unchanged(key)
        if done < len(view):
            raise FileError("the file ends before its time", file=self.name, key=key)

    def _read_at(self, position: int, view: memoryview) -> int:
        """Read some bytes at ``position`` of the file; how many."""
        if hasattr(os, "preadv"):
            return os.preadv(self._stream.fileno(), [view], position)
        with self._lock:
            self._stream.seek(position)
            return self._stream.readinto(view)

    def _check_unchanged(self, key: str) -> None:
        now = self._present_stamp()
        if now != self._stamp:
            what = "has become shorter" if now[0] < self._stamp[0] else "was written to"
            raise FileError(f"the file {what} after it was opened; open it again", file=self.name, key=key)

    def _present_stamp(self) -> tuple[int, int]:
        status = os.fstat(self._stream.fileno())
        return status.st_size, status.st_mtime_ns


class DictSource:
    """A dict of tensors, as a loader node hands it over: those that are in it now, whatever becomes of the dict.

    Their numbers are not copied, and nothing is changed.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], name: str | None = None, metadata=None):
        self.name = name or "<dict>"
        self.metadata: dict[str, str] = dict(metadata or {})
        tensors = dict(tensors)
        self.entries: dict[str, Entry] = {key: self._entry(key, value) for key, value in tensors.items()}
        # Tensors of their own on the same memory: the caller's may be given other data, of another shape.
        self._tensors = {key: value.detach() for key, value in tensors.items()}

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
        """The tensor under ``key``, in the memory that it has in the dict."""
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
