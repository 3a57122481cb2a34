"""What nodes that merge, extract or save weights ask of a patcher, answered with its LoRAs in.

A quantized layer has no weight that another model's could be added to or taken from. It stays as it is, one line
says so, and no part of it (its packed bias, say) is passed off as a weight. Unquantized layers are merged, extracted
and saved as on any model, by ComfyUI's own methods: the overrides of ComfyUI-nunchaku stop at the first bias (Z-Image)
or patch nothing (Qwen-Image).
"""

from __future__ import annotations

import contextlib
import functools

from qpatch import log

from . import models, running, stack

_PREFIX = "diffusion_model."
#: Attribute of ComfyUI's model object: the user has been told.
_TOLD = "qpatch_told_of_merging"


def for_plain_layers(patcher, patches, family) -> dict:
    """``patches`` without those of quantized layers; where any are left out, a line says so."""
    model = models.diffusion_model(patcher.model)
    kept = {key: patch for key, patch in patches.items()
            if not _is_quantized(model, key if isinstance(key, str) else key[0], family)}
    if len(kept) < len(patches):
        _tell_once(patcher.model, model)
    return kept


def with_loras_as_comfyui_s(original):
    """``get_key_patches``: the unquantized layers, the LoRAs of this patcher (and of no other) as differences."""

    def get_key_patches(self, *args, **kwargs):
        if models.family(self) is None:
            return original(self, *args, **kwargs)
        model = models.diffusion_model(self.model)
        with running.turn(self, bare=True):
            found = original(self, *args, **kwargs)
            found = {key: patches for key, patches in found.items() if not _is_quantized(model, key)}
            standing = {key: _value(self.model, key) for key in found} if stack.of(self) is not None else {}
        with running.turn(self) if standing else contextlib.nullcontext():
            for key, before in standing.items():
                composed = _value(self.model, key)
                if composed is not before:
                    change = composed.detach().float() - before.detach().float()
                    found[key].append((1.0, ("diff", (change,)), 1.0, None, None))
        _tell_once(self.model, model)
        return found

    return get_key_patches


def _value(model, key: str):
    return functools.reduce(getattr, key.split("."), model)


def with_standing_loras(original):
    """``model_state_dict``: LoRAs that are in a loaded model are in its weights, as ComfyUI's own would be."""

    def model_state_dict(self, *args, **kwargs):
        standing = self.model.state_dict() if self.is_injected and stack.of(self) is not None else {}
        state = original(self, *args, **kwargs)
        state.update((key, standing[key]) for key in list(state) if key in standing)
        if any(isinstance(patch[1], list) for patches in self.patches.values() for patch in patches):
            # What is read from a merged model is a difference, which a quantized layer does not have.
            model = models.diffusion_model(self.model)
            for key in [key for key in state if _is_quantized(model, key)]:
                del state[key]
        return state

    return model_state_dict


def by_comfyui(cls):
    """Makes ``patch_weight_to_device`` of ``cls`` ComfyUI's own, with the LoRAs in a weight that is asked for."""

    def make(_original):
        def patch_weight_to_device(self, key, device_to=None, inplace_update=False, return_weight=False, **kwargs):
            patch = super(cls, self).patch_weight_to_device
            if not return_weight:
                return patch(key, device_to, inplace_update, **kwargs)
            with running.turn(self):
                return patch(key, device_to, inplace_update, return_weight=True, **kwargs)

        return patch_weight_to_device

    return make


def patching_as_it_loads(original):
    """``load`` of a patcher that only moves its model: what other patches there are is applied as well."""

    def load(self, device_to=None, *args, **kwargs):
        result = original(self, device_to, *args, **kwargs)
        if self.patches:
            with self.use_ejected():
                for key in [key for key in self.patches if key not in self.backup]:
                    self.patch_weight_to_device(key, device_to=device_to)
                    # ComfyUI's mark of a layer whose weight need not be patched any more when it is asked for.
                    self.model.get_submodule(key.rpartition(".")[0]).comfy_patched_weights = True
            # ComfyUI restores the weights when this is not the identifier of what it loads next.
            self.model.current_weight_patches_uuid = self.patches_uuid
        return result

    return load


def restoring_as_it_leaves(original):
    """``detach`` of a patcher that only moves its model: what :func:`patching_as_it_loads` did is undone."""

    def detach(self, unpatch_all=True):
        result = original(self, unpatch_all)
        if unpatch_all and self.backup:
            self.unpatch_model(self.offload_device, unpatch_weights=True)
        return result

    return detach


def telling_of_loras(original):
    """``state_dict_for_saving``, with a word on what the file is worth."""

    def state_dict_for_saving(self, *args, **kwargs):
        own = stack.of(self)
        if own is not None and own.wanted(self):
            log.warning("the saved model has its LoRAs in its low-rank factors (not those of modulation layers), "
                        "and lacks the metadata that ComfyUI-nunchaku's loaders need: keep the model's own file, and "
                        "load the LoRAs with it")
        return original(self, *args, **kwargs)

    return state_dict_for_saving


def _is_quantized(model, key: str, family=None) -> bool:
    """Whether ``key`` of a state dict is part of a quantized layer, here or, given ``family``, unfused elsewhere."""
    stem = key.removeprefix(_PREFIX).rpartition(".")[0]
    place = family.find(stem) if family is not None else None
    for name in (stem, place and place[0]):
        try:
            if name and hasattr(model.get_submodule(name), "qweight"):
                return True
        except AttributeError:
            # It is in another model only.
            pass
    return False


def _tell_once(base, model) -> None:
    """One line for each model: merging nodes ask key by key."""
    if _TOLD not in vars(base):
        setattr(base, _TOLD, True)
        count = sum(hasattr(module, "qweight") for module in model.modules())
        log.warning(f"{count} quantized layers of {type(base).__name__} have no weight that could be merged, "
                    "subtracted or extracted: only the other layers take part (to make one file of LoRAs: "
                    "qpatch lora merge)")
