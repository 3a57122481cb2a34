"""What is composed into a model: kept on the model, put in place and taken back as a whole.

The record is an attribute of the transformer; each changed module carries its own changes with the
original objects. Nothing about a model is kept anywhere else, so that copies and other models have
nothing to do with it.
"""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from .errors import BusyError, PlanError
from .files import LoraFile
from .modules import MARK, Change
from .modules.offload import changes_in_buffers
from .placement import locate
from .reading import Asked
from .report import FileReport, Report

#: Attribute of the transformer that holds its :class:`_State`.
_STATE = "_qpatch_lora"


@dataclass(frozen=True)
class Loaded:
    """One LoRA that is composed: its ``name``, its ``strength``, and the :class:`LoraFile` if it was given as one."""

    name: str
    strength: float
    file: LoraFile | None = None

    def __deepcopy__(self, memo):
        # A file is shared: its identity is what callers compare, and it may be gigabytes of mapped memory.
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
        """Move what was set aside to where its base is now; False if a base is another object than then, or converted."""
        return all([change.bring() for change in self.changes])


@dataclass(eq=False)
class _State:
    """``installed``: in the model. ``aside``: worked out, not in the model. ``torn``: an interrupted swap left it half done."""

    installed: Composition | None = None
    aside: Composition | None = None
    torn: bool = False
    busy: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __deepcopy__(self, memo):
        return _State(copy.deepcopy(self.installed, memo), torn=self.torn)

    def __reduce__(self):
        return _State, (self.installed, None, self.torn)


@contextmanager
def holding(root: nn.Module) -> Iterator[_State]:
    """The record of ``root``, for one thread at a time; made if there is none, gone again if it ends up empty.

    Raises :class:`BusyError` when called from inside itself (a progress callback that composes).
    """
    while True:
        state = root.__dict__.setdefault(_STATE, _State())
        with state.lock:
            if root.__dict__.get(_STATE) is not state:
                continue
            if state.busy:
                raise BusyError("a composition on this model calls for another one before it is done")
            state.busy = True
            try:
                if state.torn:
                    _mend(root, state)
                yield state
            finally:
                state.busy = False
                if state.installed is None and state.aside is None and not state.torn:
                    root.__dict__.pop(_STATE, None)
            return


def entry(function):
    """A public function: no gradients, and no inference tensors, which could not be written to later."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call


def swap(root: nn.Module, state: _State, new: Composition | None) -> None:
    """Take out what is installed and put ``new`` in place: all of it, or, on any error, nothing changed.

    Whatever needs memory or can fail is done before the first module is touched.
    """
    old = list(state.installed.changes) if state.installed else []
    old += [change for change in changes_in_buffers(root) if change not in old]
    settle = [change.move_originals() for change in old]
    state.torn = True
    try:
        for change, move in zip(reversed(old), reversed(settle)):
            change.remove()
            move()
        for change in new.changes if new else ():
            change.install()
        state.installed, state.torn = new, False
    except BaseException:
        for change in reversed(new.changes if new else ()):
            change.remove()
        for change in old:
            change.install()
        state.torn = False
        raise


def _mend(root: nn.Module, state: _State) -> None:
    """After an interruption of the undoing itself: every module's own record still leads back to the base."""
    found = [change for module in root.modules() for change in module.__dict__.get(MARK, ())]
    for change in reversed(found + list(changes_in_buffers(root))):
        change.move_originals()()
        change.remove()
    state.installed, state.torn = None, False


def rescale(state: _State, strengths: Sequence[float]) -> None:
    """Give the installed composition other strengths, in place; on any error the old ones are back.

    Raises :class:`PlanError` where a part of it is fixed to its strength, :class:`NonFiniteError` on overflow.
    """
    composition = state.installed
    before = composition.strengths
    changed = frozenset(number for number, (old, new) in enumerate(zip(before, strengths)) if old != new)
    for change in composition.changes:
        if change.fixed & changed:
            name = composition.loras[min(change.fixed & changed)].name
            raise PlanError(f"{name} is worked out for its strength in this layer (it depends on the base weight, or was "
                            "compressed); compose again for another one", key=change.path)
    writers = _writers(composition, strengths, changed)
    try:
        for write in writers:
            write()
        _note(composition, strengths)
    except BaseException:
        for write in _writers(composition, before, changed):
            write()
        _note(composition, before)
        raise


def _writers(composition, strengths, changed):
    prepared = [live.prepare(change.owner, strengths, changed) for change in composition.changes for live in change.live]
    return [write for write in prepared if write is not None]


def _note(composition: Composition, strengths) -> None:
    composition.loras = tuple(replace(lora, strength=new) for lora, new in zip(composition.loras, strengths))
    for file, strength in zip(composition.reports, strengths):
        file.strength = strength


def number(strength, name) -> float:
    """``strength`` as a finite float; raises :class:`PlanError`."""
    try:
        value = float(strength)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise PlanError(f"the strength of {name} is not a finite number", found=repr(strength))
    return value


@entry
def set_strengths(model: nn.Module, strengths: Sequence[float]) -> Report:
    """Give the LoRAs in ``model`` other strengths, in the order in which they were composed.

    Only the scaled factors are rewritten, in place. 0 gives the base exactly, an old value the old bits.
    Raises :class:`PlanError` if nothing is composed, the number of strengths is wrong, or a LoRA cannot be
    rescaled (compose again then), and :class:`NonFiniteError` for a strength that the dtype cannot hold. The
    model is as before then.
    """
    root, _ = locate(model)
    with holding(root) as state:
        if state.installed is None:
            raise PlanError("no LoRA is composed into this model")
        names = [lora.name for lora in state.installed.loras]
        if len(strengths) != len(names):
            raise PlanError("one strength is needed for each LoRA", expected=len(names), found=len(strengths))
        rescale(state, [number(strength, name) for strength, name in zip(strengths, names)])
        return state.installed.report


@entry
def reset(model: nn.Module) -> None:
    """Take every LoRA out of ``model``: the original parameter objects stand again, bit for bit.

    If the model was moved or converted meanwhile, they are brought to where it is now.
    """
    root, _ = locate(model)
    with holding(root) as state:
        swap(root, state, None)
        state.aside = None


@entry
def set_aside(model: nn.Module) -> None:
    """Like :func:`reset`, but keep what was worked out: composing the same files again puts it back at once."""
    root, _ = locate(model)
    with holding(root) as state:
        composition = state.installed
        swap(root, state, None)
        state.aside = composition or state.aside


def composed(model: nn.Module) -> tuple[Loaded, ...]:
    """The LoRAs that are in ``model``, in order; () for a bare one."""
    root, _ = locate(model)
    state = root.__dict__.get(_STATE)
    return state.installed.loras if state is not None and state.installed is not None else ()
