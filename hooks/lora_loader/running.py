"""Bring the model to the stack of the patcher that runs, and back when it stops.

The clones of a patcher share one model. What is composed in it is read from the model itself
(``composed``); whose turn it is, ComfyUI knows: it ejects one patcher before it injects another.
"""

from __future__ import annotations

import contextlib

from qpatch import toggles

# The functions themselves, not the package that loads them on demand: patchers are deleted at interpreter exit too.
from qpatch.lora.composition import composed, reset, set_aside
from qpatch.lora.errors import LoraError, PlanError
from qpatch.lora.planning import compose

from . import messages, models, options, stack

#: Attribute of ComfyUI's model object: what is composed in it was worked out while hooks had changed its weights.
_HOOKED = "qpatch_composed_under_hooks"


def injections() -> list:
    """ComfyUI's injection that calls :func:`inject` and :func:`eject` around a patcher's turn."""
    from comfy.patcher_extension import PatcherInjection

    return [PatcherInjection(inject=inject, eject=eject)]


def inject(patcher) -> None:
    """Compose what the stack of ``patcher`` wants; nothing is computed if it was composed before and set aside.

    An error here never stops the loading of a model: the LoRA at fault is left out, or all are, and the log
    says so. Only for want of memory it goes on to ComfyUI, which knows what to unload then.
    """
    model, own = models.diffusion_model(patcher.model), stack.of(patcher)
    if own is None or model is None:
        return
    _forget_what_hooks_changed(patcher, model)
    wanted = own.wanted(patcher)
    while wanted:
        try:
            return _compose(model, own, wanted)
        except LoraError as error:
            messages.refused(error)
            rest = [(one, strength) for one, strength in wanted if one.name != error.file]
            wanted = rest if len(rest) < len(wanted) else []
        except Exception as error:
            if toggles.strict() or isinstance(error, MemoryError) or "out of memory" in str(error).lower():
                raise
            messages.failed(wanted)
            wanted = []
    _take_out(model)


def _forget_what_hooks_changed(patcher, model) -> None:
    """ComfyUI's hooks write patches that are no LoRA into the weights in place: what was composed of those is stale."""
    changed = bool(getattr(patcher, "hook_backup", None))
    if changed or vars(patcher.model).get(_HOOKED, False):
        reset(model)
        setattr(patcher.model, _HOOKED, changed)


def eject(patcher) -> None:
    """Give the model its own parameters back; what was composed is kept for the next time."""
    model = models.diffusion_model(patcher.model)
    if model is not None:
        _take_out(model)


@contextlib.contextmanager
def turn(patcher, bare: bool = False):
    """In here the model is as ``patcher`` wants it, or bare; afterwards as it was, whichever clone is loaded."""
    if patcher.is_injected and not bare:
        yield
        return
    model = models.diffusion_model(patcher.model)
    with patcher.use_ejected():
        before = _standing(model)
        _take_out(model)
        if not bare:
            inject(patcher)
        try:
            yield
        finally:
            _take_out(model)
            if before:
                loras = [(one.file, one.strength) for one in before]
                compose(model, loras, options.max_rank(), leave_out=options.leave_out(model), log=False)


def _standing(model) -> tuple:
    """What is composed in ``model``; nothing of ours is in what another pack may have put in its place."""
    try:
        return composed(model)
    except PlanError:
        return ()


def _take_out(model) -> None:
    if _standing(model):
        set_aside(model)


def _compose(model, own, wanted) -> None:
    loras = [(one.file, strength) for one, strength in wanted]
    report = compose(model, loras, options.max_rank(), leave_out=options.leave_out(model), log=False)
    if own.told != own.entries:
        own.told = list(own.entries)
        messages.tell(report)
