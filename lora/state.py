"""What a model knows about the LoRAs in it: one record on the transformer, gone again when nothing is left to know.

Each changed module carries its own changes with the original objects; the record lists them. Nothing about a
model is kept anywhere else, so that copies and other models have nothing to do with it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from .errors import BusyError
from .files import LoraFile
from .modules import MARK, Change
from .modules.change import relocate
from .modules.offload import changes_in_buffers
from .reading import Asked
from .report import FileReport, Report

#: Attribute of the transformer that holds its :class:`State`, and name of the child module that follows its moves.
RECORD = "_qpatch_lora"
FOLLOWER = "qpatch_lora_follower"


@dataclass(frozen=True)
class Loaded:
    """One LoRA that is composed: its ``name``, its ``strength``, and the :class:`LoraFile` if it was given as one."""

    name: str
    strength: float
    file: LoraFile | None = None

    def __deepcopy__(self, memo):
        # A file is shared: its identity is what callers compare, and it may be a dict of gigabytes.
        return self

    def __reduce__(self):
        return Loaded, (self.name, self.strength)


@dataclass(eq=False)
class Composition:
    """A stack of LoRAs worked out for one model.

    ``reports`` are those of ``loras``; ``report`` has the refused files as well. ``asked``: for what it was worked out.
    """

    loras: tuple[Loaded, ...]
    changes: list[Change]
    report: Report
    reports: list[FileReport]
    asked: Asked

    @property
    def strengths(self) -> list[float]:
        return [lora.strength for lora in self.loras]

    def is_of(self, asked: Asked) -> bool:
        """Whether it was worked out from these very files, with these options."""
        return self.asked.same(asked)

    def chosen(self, strengths: Sequence[float]) -> list[float]:
        """Of the strengths of all files asked for, those of the files that were not refused."""
        return [strength for file, strength in zip(self.report.files, strengths) if file.problem is None]

    def stands(self) -> bool:
        """Whether the modules still hold what was put into them."""
        return all(change.stands() for change in self.changes)

    def bring(self) -> bool:
        """Move what was set aside to where its base is now.

        False if a base is another object than then, or converted.
        """
        # A list: over a generator, all() would leave the rest where it is after the first False.
        brought = [change.bring() for change in self.changes]
        return all(brought)


@dataclass(eq=False)
class State:
    """``installed``: in the model. ``aside``: worked out, not in the model. ``torn``: it is half done."""

    installed: Composition | None = None
    aside: Composition | None = None
    torn: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    def spare(self) -> Iterator[torch.Tensor]:
        """The tensors that belong to the model and are not in it now."""
        for change in self.installed.changes if self.installed else ():
            yield from (value for value in change.originals.values() if isinstance(value, torch.Tensor))
        for change in self.aside.changes if self.aside else ():
            yield from (value for value in change.values.values() if isinstance(value, torch.Tensor))

    @property
    def empty(self) -> bool:
        return self.installed is None and self.aside is None and not self.torn

    def mend(self, root: nn.Module) -> None:
        """After an interruption of the undoing itself: every module's own changes still lead back to the base."""
        found = [change for module in root.modules() for change in module.__dict__.get(MARK, ())]
        for change in reversed(found + list(changes_in_buffers(root))):
            settle = change.move_originals()
            change.remove()
            settle()
        self.installed, self.torn = None, False

    def settle(self, root: nn.Module) -> None:
        """Leave on ``root`` what belongs there now: record and follower, or nothing."""
        if self.empty:
            root.__dict__.pop(RECORD, None)
            root._modules.pop(FOLLOWER, None)
        elif FOLLOWER not in root._modules:
            root._modules[FOLLOWER] = Follower(self)

    def __deepcopy__(self, memo):
        return State(copy.deepcopy(self.installed, memo), torn=self.torn)

    def __reduce__(self):
        return State, (self.installed, None, self.torn)


class Follower(nn.Module):
    """A child of the transformer without parameters: what is not in the model now goes where the model goes.

    Original parameters, and compositions that were set aside, would otherwise stay behind in the memory of a GPU when
    the model leaves it. Only places are followed: the originals keep their dtype, and so their bits.
    """

    def __init__(self, state: State):
        super().__init__()
        self.__dict__["state"] = state

    def _apply(self, fn, recurse=True):
        for tensor in self.state.spare():
            moved = fn(tensor)
            if moved.device != tensor.device:
                relocate(tensor, moved if moved.dtype == tensor.dtype else tensor.to(moved.device))
        return self


@contextmanager
def holding(root: nn.Module) -> Iterator[State]:
    """The record of ``root``, for one thread at a time; made if there is none, gone again if it ends up empty.

    Raises :class:`BusyError` when called from inside itself (a progress callback that composes).
    """
    while True:
        state = root.__dict__.setdefault(RECORD, State())
        # Asked of the lock itself: a flag would stay up after an interruption at the wrong moment.
        if state.lock._is_owned():
            raise BusyError("a composition on this model calls for another one before it is done")
        with state.lock:
            if root.__dict__.get(RECORD) is not state:
                continue
            try:
                if state.torn:
                    state.mend(root)
                yield state
            finally:
                try:
                    if state.torn:
                        state.mend(root)
                finally:
                    state.settle(root)
            return


