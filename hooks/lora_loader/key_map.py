"""Hook on comfy.lora: nodes that parse a LoRA themselves learn the names of the quantized layers too."""

from __future__ import annotations

import inspect

from qpatch import lora
from qpatch.finding import incompatible, needed
from qpatch.patching import Wrap

from . import models

_PREFIXES = ("diffusion_model.", "transformer.", "base_model.model.", "")
_FLAT_PREFIXES = ("lora_unet_", "lycoris_")


def examine(module):
    function = vars(module).get("model_lora_keys_unet")
    if function is None or list(inspect.signature(function).parameters)[:2] != ["model", "key_map"]:
        return incompatible("comfy.lora has no model_lora_keys_unet(model, key_map)")
    return needed("the key map is built from keys that end in .weight, and quantized layers have none")


def patches(module):
    return [Wrap(module, "model_lora_keys_unet", with_quantized_layers)]


def with_quantized_layers(original):
    """The key map with a name for each quantized layer, as the unquantized model's would have.

    The keys need not exist in the state dict: ``add_patches`` of a Nunchaku patcher understands them.
    """

    def model_lora_keys_unet(model, *args, **kwargs):
        found = original(model, *args, **kwargs)
        diffusion_model = models.diffusion_model(model)
        family = diffusion_model is not None and lora.family_of(diffusion_model)
        if not family:
            return found
        if not args and "key_map" not in kwargs:
            # Upstream's default is one dict for all models ever seen; ours must not leak into it.
            found = dict(found)
        for name, key in _names(diffusion_model, family):
            found.setdefault(name, key)
        return found

    return model_lora_keys_unet


def _names(diffusion_model, family):
    """(name in a LoRA file, key of the weight) of every source layer of every quantized module."""
    for canonical, module in diffusion_model.named_modules():
        entry = family.module(canonical) if hasattr(module, "qweight") else None
        if entry is None:
            continue
        block = canonical.removesuffix(entry.name)
        sources = [names for _, names in entry.parts] + [(entry.name, *entry.aliases)]
        for names in sources:
            key = f"diffusion_model.{block}{names[0]}.weight"
            for name in (f"{block}{name}" for name in names):
                yield from ((prefix + name, key) for prefix in _PREFIXES)
                yield from ((prefix + name.replace(".", "_"), key) for prefix in _FLAT_PREFIXES)
