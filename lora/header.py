"""The header of a safetensors file, read strictly and without torch.

A safetensors file is: 8 bytes little-endian length n, n bytes of JSON, the data. The JSON maps
each key to its dtype, shape and [begin, end) in the data; ``__metadata__`` maps text to text.
All of it is checked here, before anybody reads the data, so that a bad file is one clear error.
"""

from __future__ import annotations

import io
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .errors import FileError

#: A hundred thousand keys take 10 MB; a real LoRA has well below 1 MB. (The safetensors library stops at 100 MB.)
MAX_HEADER = 32_000_000

#: More dimensions than torch itself takes.
MAX_DIMENSIONS = 64

#: Bits per element of every dtype tag that safetensors defines.
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}

#: First bytes of what people save under a .safetensors name by mistake.
_IMPOSTORS = (
    (b"PK\x03\x04", "a zip archive: a PyTorch .pt/.ckpt file. Pickle files are refused; ask for a .safetensors file"),
    (b"\x80\x02", "a Python pickle. Pickle files are refused; ask for a .safetensors file"),
    (b"\x80\x03", "a Python pickle. Pickle files are refused; ask for a .safetensors file"),
    (b"\x80\x04", "a Python pickle. Pickle files are refused; ask for a .safetensors file"),
    (b"\x80\x05", "a Python pickle. Pickle files are refused; ask for a .safetensors file"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself. Run `git lfs pull` or download it again"),
    (b"GGUF", "a GGUF model, not a LoRA in safetensors format"),
    (b"\x1f\x8b", "gzip data; unpack it first"),
)


class Entry(NamedTuple):
    """One tensor: dtype tag as in :data:`BITS`, shape, and its bytes [begin, end) of the data part."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """``entries``: key -> :class:`Entry`, in the file's order. ``start``: file offset of the data part."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    start: int
    size: int


def read(path: str | os.PathLike, name: str | None = None) -> Header:
    """Read and check the header of the safetensors file at ``path``, called ``name`` in messages.

    Raises :class:`FileError`.
    """
    name = name or str(path)
    with opened(path, name) as stream:
        return read_from(stream, name)


def opened(path: str | os.PathLike, name: str) -> io.FileIO:
    """The regular file at ``path``, unbuffered; raises :class:`FileError`."""
    path = Path(path)
    try:
        if path.is_dir():
            raise FileError("this is a folder; name the .safetensors file in it", file=name)
        if path.exists() and not path.is_file():
            raise FileError("this is no regular file", file=name)
        return open(path, "rb", buffering=0)
    except (OSError, ValueError) as error:
        # ValueError: a path with a NUL in it.
        raise FileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", file=name) from error


def read_from(stream: io.FileIO, name: str) -> Header:
    """:func:`read`, of a file that is open."""
    try:
        size = os.fstat(stream.fileno()).st_size
        length = _length(name, stream.read(512), size)
        stream.seek(8)
        raw = stream.read(length)
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror or error}", file=name) from error
    if len(raw) < length:
        raise FileError("the file has become shorter while its header was read", file=name)
    return parse(name, raw, size)


def _length(name, first, size):
    """The length of the header, for a file of ``size`` bytes that begins with ``first``."""
    if size == 0:
        raise FileError("the file is empty", file=name)
    length = int.from_bytes(first[:8], "little")
    # This test comes first: lengths such as 640 have the first bytes of a pickle.
    if length > MAX_HEADER or first[8:9] != b"{":
        _refuse_impostors(name, first)
        raise FileError("this is not a safetensors file", file=name)
    if length > size - 8:
        raise FileError("the file is truncated inside its header", file=name, expected=f"{length} bytes of header",
                        found=f"{size - 8}")
    return length


def _refuse_impostors(name, first):
    for magic, what in _IMPOSTORS:
        if first.startswith(magic):
            raise FileError(f"this is {what}", file=name)
    text = first.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise FileError("this is a web page (often a login or error page) saved in place of the file; "
                        "download it again", file=name)
    if text.startswith(b'{"'):
        raise FileError("this is a JSON text (often a server's error message), not a safetensors file", file=name)


def parse(name: str, raw: bytes, size: int) -> Header:
    """Check ``raw``, the header's JSON (it begins with a brace), of a file of ``size`` bytes called ``name``."""
    entries = _object(name, raw)
    metadata = _metadata(name, entries.pop("__metadata__", {}))
    start = 8 + len(raw)
    checked = {key: _entry(name, key, entry) for key, entry in entries.items()}
    _check_layout(name, checked, size - start)
    return Header(checked, metadata, start, size)


def _object(name, raw):
    def unique(pairs):
        table = dict(pairs)
        if len(table) != len(pairs):
            seen = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise FileError("the key is in the header twice", file=name, key=twice)
        return table

    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=_no_constant)
        if rb"\u" in raw:
            # Half of a surrogate pair, which JSON can spell: no text that could be printed or written.
            json.dumps(table, ensure_ascii=False).encode("utf-8")
        return table
    except (ValueError, RecursionError) as error:
        raise FileError(f"the header is not the JSON of a safetensors file: {error}", file=name) from error


def _no_constant(text):
    raise ValueError(f"{text} is not a JSON number")


def _metadata(name, table):
    if isinstance(table, dict) and all(isinstance(value, str) for value in table.values()):
        return table
    raise FileError("the metadata is not a table of texts", file=name, key="__metadata__")


def _whole(values) -> bool:
    """Whether ``values`` is a list of non-negative numbers that fit 64 bits."""
    if type(values) is not list:
        return False
    for value in values:
        # A bool is an int too.
        if type(value) is not int or not 0 <= value < 2**63:
            return False
    return True


def _entry(name, key, entry):
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FileError("the header's entry is malformed", file=name, key=key,
                        expected="dtype, shape and data_offsets", found=str(entry)[:80])
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise FileError("unknown dtype tag", file=name, key=key, expected="one of " + ", ".join(BITS),
                        found=str(dtype)[:40])
    if not _whole(shape) or len(shape) > MAX_DIMENSIONS:
        raise FileError("the shape is not a short list of non-negative numbers", file=name, key=key,
                        found=str(shape)[:80])
    if not _whole(offsets) or len(offsets) != 2:
        raise FileError("the data offsets are malformed", file=name, key=key, found=str(offsets)[:80])
    return Entry(dtype, tuple(shape), offsets[0], offsets[1])


def _check_layout(name, entries, data_size):
    """Each tensor has as many bytes as its shape needs; together they fill the data without gap or overlap."""
    position = 0
    for key, (dtype, shape, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        bits = math.prod(shape, start=BITS[dtype])
        if bits != 8 * (end - begin):
            raise FileError(f"shape and bytes disagree: {dtype} {list(shape)}", file=name, key=key,
                            expected=f"{-(-bits // 8)} bytes", found=f"{end - begin}")
        if begin != position:
            raise FileError("the data offsets leave a gap or overlap", file=name, key=key,
                            expected=f"begin at {position}", found=begin)
        position = end
        if position > data_size:
            raise FileError("the file is truncated: it ends before the data of this key", file=name, key=key,
                            expected=f"at least {position} bytes of data", found=data_size)
    if position != data_size:
        raise FileError("there are bytes behind the last tensor", file=name,
                        expected=f"{position} bytes of data", found=data_size)
