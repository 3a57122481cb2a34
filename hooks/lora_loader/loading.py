"""Hook on comfy.sd: what LoRA nodes call to put a LoRA on a model and a text encoder."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from qpatch import toggles
from qpatch.finding import incompatible, needed
from qpatch.lora.errors import LoraError
from qpatch.lora.keys import FLAGS, Resolver
from qpatch.patching import Wrap

from . import messages, models, opened, stack

LOADERS = ("load_lora_for_models", "load_bypass_lora_for_models")
_PARAMETERS = ["model", "clip", "lora", "strength_model", "strength_clip"]


def _present(module) -> list[str]:
    return [name for name in LOADERS if name in vars(module)]


def examine(module):
    for name in _present(module):
        found = list(inspect.signature(vars(module)[name]).parameters)[:5]
        if found != _PARAMETERS:
            return incompatible(f"{name} takes ({', '.join(found)}, ...), known is ({', '.join(_PARAMETERS)}, ...)")
    return needed("LoRA nodes reach Nunchaku Qwen-Image and Z-Image through qpatch.lora; ComfyUI's own LoRA code and "
                  "the one of ComfyUI-nunchaku see neither the quantized layers' names nor their adapters")


def patches(module):
    return [Wrap(module, name, through_qpatch) for name in _present(module)]


def through_qpatch(original):
    """ComfyUI's loading function, the model part of the LoRA taken out for the models that qpatch knows.

    The text encoder's part, the clones and their attachments stay the original's business. Bypass mode is
    no different here: a quantized layer keeps its weight either way.
    """

    def load(model, clip, lora, strength_model, strength_clip, *args, **kwargs):
        family = models.family(model)
        if family is None or not isinstance(lora, Mapping):
            return original(model, clip, lora, strength_model, strength_clip, *args, **kwargs)
        rest = _not_for_the_model(lora, family) if clip is not None else {}
        new_model, new_clip = original(model, clip, rest, strength_model, strength_clip, *args, **kwargs)
        # Nothing that ComfyUI patches has changed: with the parent's identifier it keeps the loaded
        # weights, and the injection alone brings the LoRAs.
        new_model.patches_uuid = model.patches_uuid
        _put_on(new_model, lora, family, strength_model, texts_matter=clip is None)
        return new_model, new_clip

    return load


def _not_for_the_model(lora, family) -> dict:
    resolve = Resolver(family)
    return {key: tensor for key, tensor in lora.items() if key not in FLAGS and resolve(key).target is None}


def _put_on(patcher, tensors, family, strength: float, texts_matter: bool) -> None:
    """``texts_matter``: whether it is news that the file is for a text encoder, because none is there to take it."""
    own = stack.ensure(patcher)
    wanted = opened.lora(tensors, family, fallback=f"lora #{len(own.entries) + 1}")
    try:
        holds_layers = bool(wanted.file.layers)
    except LoraError as error:
        messages.refused(error)
        return
    except Exception:
        if toggles.strict():
            raise
        messages.failed([(wanted, strength)])
        return
    if strength != 0:
        if holds_layers:
            own.entries.append(stack.Entry(wanted, strength))
        else:
            messages.without_layers(wanted.file, texts_matter)
