"""Bring the model to the stack of the patcher that runs, and back when it stops.

The clones of a patcher share one model. What is composed in it is read from the model
(``composed``), whose turn it is from ``_HOLDER`` on the model; nothing else is remembered.
"""

from __future__ import annotations

from qpatch import toggles

# The functions themselves, not the package that loads them on demand: patchers are deleted at interpreter exit too.
from qpatch.lora.composition import composed, set_aside
from qpatch.lora.errors import LoraError
from qpatch.lora.planning import compose

from . import messages, models, options, stack

#: Attribute of the diffusion model: the stack of the patcher that injected last and has not ejected.
_HOLDER = "_qpatch_lora_stack"


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
    setattr(model, _HOLDER, own)
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
    if composed(model):
        set_aside(model)


def eject(patcher) -> None:
    """Give the model its own parameters back, if it is ``patcher`` whose LoRAs are in it."""
    model, own = models.diffusion_model(patcher.model), stack.of(patcher)
    if model is None or model.__dict__.get(_HOLDER) is not own:
        return
    set_aside(model)
    model.__dict__.pop(_HOLDER, None)


def _compose(model, own, wanted) -> None:
    loras = [(one.file, strength) for one, strength in wanted]
    report = compose(model, loras, options.max_rank(), leave_out=options.leave_out(model), log=False)
    if own.told != own.entries:
        own.told = list(own.entries)
        messages.tell(report)
