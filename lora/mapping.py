"""Files mapped into memory for a moment in which nobody can make them shorter.

Reading the factors of a large file takes as long as packing them; mapping them takes no time. But to touch a mapping
behind the end of a file that was truncated ends the process (SIGBUS), without an exception. So a file is mapped only
under a lease of Linux: whoever wants to truncate it or open it for writing waits until the lease is given back,
at the end of the composition. Where there is none to be had (a file of another user, one that somebody has open for
writing, another file system or operating system), the caller reads.
"""

from __future__ import annotations

import io
import mmap
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar

import torch

_allowed: ContextVar[_Mappings | None] = ContextVar("_allowed", default=None)


@contextmanager
def allowed() -> Iterator[None]:
    """Within it, :func:`data_of` maps files. No view of them may be used after it."""
    with ExitStack() as leases:
        token = _allowed.set(_Mappings(leases))
        try:
            yield
        finally:
            _allowed.reset(token)


def data_of(stream: io.FileIO) -> torch.Tensor | None:
    """All bytes of an open file, mapped; None where that is not allowed now, or not safe."""
    mappings = _allowed.get()
    return None if mappings is None else mappings.of(stream)


class _Mappings:
    def __init__(self, leases: ExitStack):
        self._leases = leases
        self._known: dict[io.FileIO, torch.Tensor | None] = {}

    def of(self, stream: io.FileIO) -> torch.Tensor | None:
        if stream not in self._known:
            self._known[stream] = self._map(stream) if sys.platform == "linux" else None
        return self._known[stream]

    def _map(self, stream: io.FileIO) -> torch.Tensor | None:
        import fcntl

        try:
            # A lease belongs to an opening of a file, and another thread may use this one.
            descriptor = os.open(f"/proc/self/fd/{stream.fileno()}", os.O_RDONLY)
            self._leases.callback(os.close, descriptor)
            # Whoever waits is announced by a signal. SIGIO, the default, would end the process; this one is ignored.
            fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            # Given back by name: mmap has a copy of the descriptor, which lives as long as any view.
            self._leases.callback(_give_back, descriptor)
            return torch.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        except (OSError, ValueError):
            # No lease, or (ValueError) the file is empty by now: the caller reads it, and sees what is the matter.
            return None


def _give_back(descriptor: int) -> None:
    import fcntl

    # Whoever waits for longer than the system has set (45 s) gets the file without being asked for it.
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
