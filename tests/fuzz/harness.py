"""What must hold for every LoRA file, whatever is in it.

Opening, planning, applying and inspecting succeed, or raise a LoraError that names the file and, where one is to
blame, the key. No other exception; no hang; no more memory than the size of the file explains. A refused file has
left the model as it was, bit for bit and object for object; after an accepted one, ``reset`` gives the base back.
"""

from __future__ import annotations

import json
import signal
import struct
import sys
from contextlib import contextmanager
from pathlib import Path

import producers
import torch
import trees

from qpatch import lora
from qpatch.lora.inspection import measure, survey

from .cases import Case
from .tensors import DIMS

#: CPU seconds that one file may take.
SECONDS = 5
#: Real seconds after which a process that hangs inside of one call is ended by SIGALRM.
STUCK = 300
#: Memory that handling a file may take: this, and so many times its size (factors in float64, products of small ones).
MEGABYTES, TIMES = 96, 60

NAME = "fuzzed.safetensors"


class Hang(BaseException):
    """A file that takes too long. No ``Exception``: nothing may catch it."""


class Broken(AssertionError):
    """The property does not hold."""


class Model:
    """A tiny model with its bare state. It must be bare between two files."""

    def __init__(self, root, family: str):
        self.root, self.family = root, family
        self.objects = self._objects()
        #: Each tensor's memory, as it is now and as it was.
        self.memory = {name: _bytes(value) for name, value in self.objects.items()}
        self.copies = {name: memory.clone() for name, memory in self.memory.items()}
        good = producers.make("peft", family, rank=2, dims=DIMS[family], seed=9).tensors
        self.good = dict(list(good.items())[:6])

    def _objects(self) -> dict[str, torch.Tensor]:
        return dict([*self.root.named_parameters(), *self.root.named_buffers()])

    def check_bare(self) -> None:
        now = self._objects()
        if now.keys() != self.objects.keys() or any(value is not self.objects[name] for name, value in now.items()):
            raise Broken("the model holds other objects than before")
        for name, value in now.items():
            memory = self.memory[name]
            if value.data_ptr() != memory.data_ptr() or not torch.equal(memory, self.copies[name]):
                raise Broken(f"{name} has changed")
        for module in self.root.modules():
            if any("qpatch" in name for name in (*module.__dict__, *module._modules)) or module._forward_hooks:
                raise Broken("something is left on a module")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def models() -> list[Model]:
    """SVDQ in int4 and nvfp4, AWQ, Linears, norms, and the fused module of diffusers' Z-Image."""
    torch.manual_seed(0)
    return [Model(trees.qwen(h=128, f=128), "qwen-image"),
            Model(trees.qwen(h=128, f=128, precision="nvfp4", dtype=torch.float16), "qwen-image"),
            Model(trees.z_image(h=128, f=128, refiners="plain"), "z-image"),
            Model(trees.z_image(h=128, f=128, precision="nvfp4", diffusers="fused_module"), "z-image")]


class Harness:
    """Checks cases one after the other, each written to ``folder`` first: after a crash it is still there."""

    def __init__(self, folder: Path):
        self.path = Path(folder) / NAME
        self.models = models()
        #: What became of the cases: kind of error or "applied" -> how many.
        self.seen: dict[str, int] = {}

    def check(self, case: Case) -> None:
        """Raise :class:`Broken`, or whatever else came out, if the property does not hold for ``case``."""
        # A new file each time: some file systems write one that is emptied and filled again to the disk at once.
        self.path.unlink(missing_ok=True)
        self.path.write_bytes(case.content)
        keys, model = keys_of(case.content), self.models[case.model]
        try:
            with limits(len(case.content)):
                self._inspect(keys)
                outcome = self._compose(case, model, keys)
            model.check_bare()
        except BaseException:
            self.models = models()
            raise
        self.seen[outcome] = self.seen.get(outcome, 0) + 1

    def _inspect(self, keys) -> str:
        try:
            found = survey(self.path)
            with found.reader:
                measure(found)
        except lora.LoraError as error:
            return refused(error, keys)
        for problem in found.problems:
            if NAME not in problem:
                raise Broken(f"the problem does not name the file: {problem}")
        return "inspected"

    def _compose(self, case: Case, model: Model, keys) -> str:
        stack = [(model.good, 1.0)] * case.beside + [(self.path, case.strength)]
        keys = keys and keys | model.good.keys()
        options = {"metadata_alpha": case.metadata_alpha, "convention": "trainer" if case.trainer else "comfyui"}
        try:
            report = lora.plan(model.root, stack, 16, **options).apply(log=False)
        except lora.LoraError as error:
            return refused(error, keys)
        str(report).encode("utf-8")
        outcome = "applied" if report.files[-1].problem is None else refused(report.files[-1].error, keys)
        try:
            lora.set_strengths(model.root, [0.5] * len(lora.composed(model.root)))
        except lora.LoraError as error:
            # One that depends on the base names the layer; there may be several files.
            str(error).encode("utf-8")
        lora.reset(model.root)
        return outcome


def refused(error: lora.LoraError, keys: set[str] | None) -> str:
    """The kind of the error, if it says what it has to."""
    text = str(error)
    text.encode("utf-8")
    if NAME not in str(error.file) or NAME not in text:
        raise Broken(f"the refusal does not name the file: {text}") from error
    if error.key is None:
        if not isinstance(error, (lora.FileError, lora.UnknownFamily)):
            raise Broken(f"the refusal does not name the key: {text}") from error
    elif keys is not None and error.key not in keys:
        raise Broken(f"the refusal names a key that is not in the file: {error.key!r}: {text}") from error
    return type(error).__name__


def keys_of(content: bytes) -> set[str] | None:
    """Every key of the header's JSON, on any level; None if it is none."""
    found: set[str] = {"__metadata__"}

    def note(pairs):
        found.update(key for key, _ in pairs)
        return dict(pairs)

    try:
        (length,) = struct.unpack("<Q", content[:8])
        json.loads(content[8:8 + length], object_pairs_hook=note)
    except (ValueError, RecursionError, struct.error):
        return None
    return found


@contextmanager
def limits(size: int):
    """Time and memory for a file of ``size`` bytes."""
    before = _reset_peak()
    signal.setitimer(signal.ITIMER_REAL, STUCK)
    old = signal.signal(signal.SIGPROF, _hang)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
        signal.setitimer(signal.ITIMER_REAL, 0)
    taken = _peak() - before
    if taken > MEGABYTES * 2**20 + TIMES * size:
        raise Broken(f"a file of {size} bytes took {taken >> 20} MiB")


def _hang(*_):
    raise Hang(f"after {SECONDS} s of CPU time")


def _reset_peak() -> int:
    """Let the peak of the memory be what is in use now, where Linux can do that; bytes in use."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return sys.maxsize
    return _peak()


def _peak() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return 1024 * int(status.split("VmHWM:")[1].split()[0])
