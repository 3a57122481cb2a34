"""Logs of any size and encoding are read a piece at a time."""

import io
import tracemalloc

import failures
import pytest

from qpatch.doctor import log_findings, log_stream
from qpatch.hooks.signatures import SIGNATURES


def names(lines):
    return [finding.signature.name for finding in log_findings.read(lines, SIGNATURES).findings]


def encoded(text, encoding, mark=b""):
    return io.BytesIO(mark + text.encode(encoding))


@pytest.mark.parametrize(("encoding", "mark"), [
    ("utf-8", b""), ("utf-8", b"\xef\xbb\xbf"), ("utf-16-le", b"\xff\xfe"), ("utf-16-be", b"\xfe\xff"),
    ("utf-16-le", b""),
])
@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_encodings_of_windows_are_told_apart_whatever_the_pieces_that_are_read(encoding, mark, chunk, monkeypatch):
    monkeypatch.setattr(log_stream, "CHUNK", chunk)
    text = "got prompt: 画风\r\n" + failures.LOGS["lazy-linear"].replace("\n", "\r\n") + "\r\nlast"
    found = list(log_stream.texts(encoded(text, encoding, mark)))
    assert found == text.replace("\r\n", "\n").split("\n")
    assert names(found) == ["lazy-linear"]


def test_bytes_that_are_no_text_are_shown_with_marks():
    assert list(log_stream.texts(io.BytesIO(b"a\xff\nb"))) == ["a\ufffd", "b"]


def test_entries_of_the_server_are_read_from_a_file_too():
    text = failures.json_of(failures.LOGS["lazy-linear"])
    assert names(log_stream.texts(io.BytesIO(text.encode()))) == ["lazy-linear"]
    assert list(log_stream.texts(io.BytesIO(b'{"entries": 3}\nrest'))) == ['{"entries": 3}', "rest"]


class Endless(io.RawIOBase):
    """A log of ``size`` bytes that is made while it is read."""

    def __init__(self, piece: bytes, size: int):
        self.piece, self.left = piece, size

    def read(self, wanted):
        taken = min(wanted, self.left)
        self.left -= taken
        return (self.piece * (taken // len(self.piece) + 1))[:taken]


@pytest.mark.parametrize("piece", [b"OSError: [Errno 5] Input/output error\n", b"\r 10%|#     | 1/10", b"x"])
def test_a_long_log_is_not_held_in_memory(piece, monkeypatch):
    monkeypatch.setattr(log_stream, "CHUNK", 1 << 16)
    tracemalloc.start()
    reading = log_findings.read(log_stream.texts(Endless(piece, 2 << 20)), SIGNATURES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reading.lines and peak < 1 << 20
