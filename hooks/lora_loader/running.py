"""Bring the model to the stack of the patcher that runs, and back when it stops.

The clones of a patcher share one model. What is composed in it is read from the model
(``lora.composed``), whose turn it is from ``_HOLDER`` on the model; nothing else is remembered.
"""

from __future__ import annotations

from qpatch import lora
from qpatch.lora.errors import LoraError

from . import messages, models, modulation, stack

#: Attribute of the diffusion model: the stack of the patcher that injected last and has not ejected.
_HOLDER = "_qpatch_lora_stack"


def injections() -> list:
    """ComfyUI's injection that calls :func:`inject` and :func:`eject` around a patcher's turn."""
    from comfy.patcher_extension import PatcherInjection

    return [PatcherInjection(inject=inject, eject=eject)]


def inject(patcher) -> None:
    """Compose what the stack of ``patcher`` wants; nothing is computed if it was composed before and set aside."""
    model, own = models.diffusion_model(patcher.model), stack.of(patcher)
    if own is None or model is None:
        return
    setattr(model, _HOLDER, own)
    wanted = own.wanted(patcher)
    while wanted:
        try:
            _compose(model, wanted)
            return
        except LoraError as error:
            wanted = _without_culprit(wanted, error)
    if lora.composed(model):
        lora.set_aside(model)


def eject(patcher) -> None:
    """Give the model its own parameters back, if it is ``patcher`` whose LoRAs are in it."""
    model, own = models.diffusion_model(patcher.model), stack.of(patcher)
    if model is None or getattr(model, _HOLDER, own) is not own:
        return
    lora.set_aside(model)
    if hasattr(model, _HOLDER):
        delattr(model, _HOLDER)


def _compose(model, wanted) -> None:
    loras = [(entry.file, strength) for entry, strength in wanted]
    with messages.progress() as progress:
        report = lora.compose(model, loras, leave_out=modulation.judge(model), progress=progress)
    messages.tell(report)


def _without_culprit(wanted, error):
    """``wanted`` without the LoRA that was refused: the others still apply. Raises ``error`` if it names none."""
    rest = [(entry, strength) for entry, strength in wanted if entry.name != error.file]
    if len(rest) == len(wanted):
        raise error
    messages.refused(error)
    return rest
