"""Put compositions in place and take them back as a whole; change strengths; tell what is in a model."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import nn

from .collecting import no_collections
from .errors import NonFiniteError, PlanError
from .modules.offload import changes_in_buffers, followers
from .modules.tree import present, strays
from .placement import locate
from .report import Report
from .state import RECORD, Composition, Loaded, State, holding


def entry(function):
    """A public function: no gradients, no inference tensors (they could not be written to later), no collections."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with torch.inference_mode(False), torch.no_grad(), no_collections():
            return function(*args, **kwargs)

    return call


def swap(root: nn.Module, state: State, new: Composition | None) -> None:
    """Take out what is installed and put ``new`` in place: all of it, or, on any error, nothing changed.

    Whatever needs memory or can fail is done before the first module is touched.
    """
    old = list(state.installed.changes) if state.installed else []
    old += [change for change in changes_in_buffers(root) if change not in old]
    old += strays(root, old)
    settle = [change.move_originals() for change in old]
    fresh = [*new.changes, *followers(root, new.changes)] if new else []
    try:
        state.torn = True
        for change, move in zip(reversed(old), reversed(settle)):
            change.remove()
            move()
        for change in fresh:
            change.install()
        state.installed, state.torn = new, False
    except BaseException:
        for change in reversed(fresh):
            change.remove()
        for change in old:
            change.install()
        state.torn = False
        raise


def rescale(state: State, strengths: Sequence[float]) -> None:
    """Give the installed composition other strengths, in place; on any error the old ones are back.

    If not even that works, ``state`` stays torn, and whoever holds it takes everything out. Raises :class:`PlanError`
    where a part of it is fixed to its strength, :class:`NonFiniteError` on overflow.
    """
    composition = state.installed
    before = composition.strengths
    changed = frozenset(number for number, (old, new) in enumerate(zip(before, strengths)) if old != new)
    for change in composition.changes:
        if change.fixed & changed:
            name = composition.loras[min(change.fixed & changed)].name
            raise PlanError(f"{name} is worked out for its strength in this layer (it or one after it depends on the "
                            "weight, or it was compressed); compose again for another one", key=change.path)
    try:
        rewrites = [live.prepare(change.owner, before, strengths, changed)
                    for change in composition.changes for live in change.live]
    except NonFiniteError as error:
        raise error.naming(", ".join(composition.loras[number].name for number in sorted(changed)))
    rewrites = [rewrite for rewrite in rewrites if rewrite is not None]
    try:
        state.torn = True
        for rewrite in rewrites:
            rewrite.write()
        _note(composition, strengths)
        state.torn = False
    except BaseException:
        for rewrite in rewrites:
            rewrite.undo()
        _note(composition, before)
        state.torn = False
        raise


def _note(composition: Composition, strengths) -> None:
    composition.loras = tuple(replace(lora, strength=new) for lora, new in zip(composition.loras, strengths))
    for file, strength in zip(composition.reports, strengths):
        file.strength = strength


def number(strength, name) -> float:
    """``strength`` as a finite float; raises :class:`PlanError`."""
    try:
        value = float(strength)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise PlanError(f"the strength of {name} is not a finite number", found=repr(strength))
    return value


def _listed(strengths) -> list:
    """``strengths`` as a list; raises :class:`PlanError` for what has no order, or is not several."""
    if not isinstance(strengths, (Mapping, Set, str, bytes)):
        try:
            return list(strengths)
        except TypeError:
            pass
    raise PlanError("strengths are given as a list of numbers, one for each LoRA", found=type(strengths).__name__)


@entry
def set_strengths(model: nn.Module, strengths: Iterable[float]) -> Report:
    """Give the LoRAs in ``model`` other strengths, in the order in which they were composed.

    Only the scaled factors are rewritten, in place. 0 gives the base exactly, an old value the old bits.
    Raises :class:`PlanError` if nothing is composed, the number of strengths is wrong, or a LoRA cannot be
    rescaled (compose again then), and :class:`NonFiniteError` for a strength that the dtype cannot hold. The
    model is as before then.
    """
    root, _ = locate(model)
    strengths = _listed(strengths)
    with holding(root) as state:
        if state.installed is None:
            raise PlanError("no LoRA is composed into this model")
        if not present(root, state.installed.changes):
            raise PlanError("a module was exchanged since the LoRAs were composed; compose them again")
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
    state = root.__dict__.get(RECORD)
    return state.installed.loras if state is not None and state.installed is not None else ()
