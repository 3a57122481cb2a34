"""Hook on comfy.sd: a second LoRA in ComfyUI's bypass mode, which takes the place of the first.

Bypass keeps the adapters of a patcher under one name. Each of them replaces the forward of its layer, so
several have to be taken out in the opposite order of going in.
"""

from __future__ import annotations

from qpatch.finding import needed, not_needed
from qpatch.patching import Wrap

#: ComfyUI's name of the injection.
NAME = "bypass_lora"
_LOADER = "load_bypass_lora_for_models"


def examine(module):
    if _LOADER not in vars(module):
        return not_needed("this ComfyUI has no bypass mode")
    return needed("a second LoRA in bypass mode makes ComfyUI forget the first")


def patches(module):
    return [Wrap(module, _LOADER, keeping_both)]


def keeping_both(original):
    def load_bypass_lora_for_models(model, clip, lora, strength_model, strength_clip, *args, **kwargs):
        new_model, new_clip = original(model, clip, lora, strength_model, strength_clip, *args, **kwargs)
        _join(model, new_model)
        _join(getattr(clip, "patcher", None), getattr(new_clip, "patcher", None))
        return new_model, new_clip

    return load_bypass_lora_for_models


def _join(before, after) -> None:
    """The injections of ``before`` in front of those that the loader has given to ``after``."""
    if before is None or after is None:
        return
    first, second = list(before.get_injections(NAME) or ()), list(after.get_injections(NAME) or ())
    # Without adapters of its own, the clone keeps the list of its parent.
    if first and second and first != second:
        after.set_injections(NAME, [_as_one([*first, *second])])


def _as_one(injections):
    def inject(patcher):
        for one in injections:
            one.inject(patcher)

    def eject(patcher):
        for one in reversed(injections):
            one.eject(patcher)

    return type(injections[0])(inject=inject, eject=eject)
