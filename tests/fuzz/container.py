"""Tensors -> the bytes of a safetensors file, and what can be wrong with those."""

from __future__ import annotations

import json
import struct

from hypothesis import strategies as st

from .tensors import Contents

_EXTENTS = st.sampled_from((-1, 0, 1, 2, 3, 2**31, 2**40, 2**62, 2**63, 2**64, 1e3, 1.5, True, None, "1", 10**400))


def table_of(contents: Contents) -> tuple[dict, bytes]:
    """(header, data), consistent."""
    table, data = {}, bytearray()
    for key, stored in contents.tensors.items():
        offsets = [len(data), len(data) + len(stored.data)]
        table[key] = {"dtype": stored.tag, "shape": list(stored.shape), "data_offsets": offsets}
        data += stored.data
    if contents.metadata is not None:
        table["__metadata__"] = contents.metadata
    return table, bytes(data)


def assemble(text: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", (len(text) if length is None else length) & 2**64 - 1) + text + data


def whole(table, data) -> bytes:
    return assemble(json.dumps(table).encode("utf-8"), data)


def _entry(draw, table):
    keys = [key for key in table if key != "__metadata__"]
    return table[draw(st.sampled_from(keys))] if keys else {}


def wrong_offsets(draw, table, data):
    entry = _entry(draw, table)
    begin, end = entry.get("data_offsets", (0, 0))
    shift = draw(st.sampled_from((1, -1, 2, len(data), -begin, 2**40, 2**63)))
    entry["data_offsets"] = draw(st.sampled_from((
        [begin + shift, end], [begin, end + shift], [begin + shift, end + shift], [end, begin], [begin], [],
        [begin, end, end], {}, [begin, None])))
    return whole(table, data)


_SHAPES = st.one_of(st.lists(_EXTENTS, max_size=4), st.sampled_from((
    [1] * 100, [0] * 60, {}, "1", 3, [0, 2**62], [2**62, 0, 2**62])))


def wrong_shape(draw, table, data):
    _entry(draw, table)["shape"] = draw(_SHAPES)
    return whole(table, data)


def wrong_dtype(draw, table, data):
    _entry(draw, table)["dtype"] = draw(st.sampled_from((
        "F31", "f32", "", None, 5, ["F32"], {"F32": 1}, "BF16", "I64", "F4", "\u0000")))
    return whole(table, data)


def wrong_entry(draw, table, data):
    """An entry that lacks a part, or is something else."""
    entry = _entry(draw, table)
    if entry and draw(st.booleans()):
        entry.pop(draw(st.sampled_from(sorted(entry))))
    else:
        table[draw(st.sampled_from(("x", "__metadata__", *list(table)[:2])))] = draw(st.sampled_from(
            (None, 5, [], {}, "text", {"a": 1}, {"dtype": "F32"}, json.loads("[" * 300 + "]" * 300), 1e300)))
    return whole(table, data)


def wrong_json(draw, table, data):
    text = json.dumps(table)
    at = draw(st.integers(0, len(text)))
    piece = draw(st.sampled_from(("", "NaN", "{", "}", ",", '"', "\\ud800", "\u00e9", "[" * 3000, '{"a":' * 3000,
                                  "\x00", "//", "1e999", "9" * 5000, "\\u0000", " " * 5000)))
    return assemble((text[:at] + piece + text[at + draw(st.integers(0, 2)):]).encode("utf-8"), data)


def wrong_bytes(draw, table, data):
    """JSON that is not UTF-8, or is in another form of it."""
    text = json.dumps(table)
    plain = text.encode()
    encoded = draw(st.sampled_from((text.encode("utf-16"), text.encode("utf-8-sig"), plain.replace(b'"', b"\xff", 1),
                                    plain + b" " * 77, b"\n" + plain, plain + b"\x00")))
    return assemble(encoded, data)


def surrogates(draw, table, data):
    """Half of a character, which JSON can spell and UTF-8 cannot."""
    text = json.dumps(table)
    name = draw(st.sampled_from((*list(table)[:3], "dtype")))
    return assemble(text.replace(json.dumps(name)[1:-1], json.dumps(name)[1:-1] + "\\ud83d", 1).encode(), data)


def twice(draw, table, data):
    """A key that is there twice, on either level."""
    text = json.dumps(table)
    key = draw(st.sampled_from((*[json.dumps(key) for key in list(table)[:3]], '"dtype"', '"shape"')))
    return assemble(text.replace(key, f'{key}: {{}}, {key}', 1).encode(), data)


def wrong_length(draw, table, data):
    text = json.dumps(table).encode()
    length = draw(st.sampled_from((0, 1, len(text) - 1, len(text) + 1, len(text) + len(data), 2**24, 2**32, 2**63,
                                   2**64 - 1)))
    return assemble(text, data, length)


def truncated(draw, table, data):
    content = whole(table, data)
    return content[:draw(st.integers(0, len(content)))]


def longer(draw, table, data):
    return whole(table, data) + draw(st.sampled_from((b"\0", b"\0" * 4096, b"garbage", b"PK\x03\x04")))


def flipped(draw, table, data):
    """Some bytes are others."""
    content = bytearray(whole(table, data))
    for _ in range(draw(st.integers(1, 4))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content)


def other_format(draw, table, data):
    return draw(st.sampled_from((b"", b"PK\x03\x04", b"\x80\x04", b"<html>", b"GGUF", b"{", b"\x1f\x8b",
                                 b"\x02" + b"\0" * 7 + b"{}"))) + data[:300]


DAMAGES = (wrong_offsets, wrong_shape, wrong_dtype, wrong_entry, wrong_json, wrong_bytes, surrogates, twice,
           wrong_length, truncated, longer, flipped, flipped, other_format)
