"""Hook on ComfyUI-nunchaku's patchers: patches that nodes and conditioning hooks hand to a patcher directly."""

from __future__ import annotations

from collections.abc import Mapping

from qpatch.finding import incompatible, needed
from qpatch.patching import Wrap

from . import loose, models, opened, stack, weights

CLASSES = ("NunchakuModelPatcher", "ZImageModelPatcher")


def _classes(module) -> list[type]:
    return [vars(module)[name] for name in CLASSES if isinstance(vars(module).get(name), type)]


def examine(module):
    for cls in _classes(module):
        missing = [name for name in (*models.ABILITIES, "add_patches", "add_hook_patches") if not hasattr(cls, name)]
        if missing:
            return incompatible(f"{cls.__name__} has no {', '.join(missing)}")
    if any("patch_weight_to_device" in vars(cls) for cls in _classes(module)):
        return needed("LoRA goes through qpatch.lora; ComfyUI-nunchaku's own LoRA path (plain LoRA only) is bypassed")
    return needed("LoRA goes through qpatch.lora; ComfyUI-nunchaku ignores every LoRA on this model")


def patches(module):
    return [Wrap(cls, name, make) for cls in _classes(module) for name, make in _changes(cls)]


def _changes(cls) -> list[tuple]:
    """(method, what makes its replacement) for a patcher class."""
    found = [("add_patches", taking_loras), ("add_hook_patches", taking_scheduled_loras),
             ("get_key_patches", weights.with_loras_as_comfyui_s), ("model_state_dict", weights.with_standing_loras),
             ("patch_weight_to_device", weights.by_comfyui(cls)), ("state_dict_for_saving", weights.telling_of_loras)]
    if "load" in vars(cls):
        found += [("load", weights.patching_as_it_loads), ("detach", weights.restoring_as_it_leaves)]
    return [(name, make) for name, make in found if hasattr(cls, name)]


def taking_loras(original):
    """``add_patches`` that puts adapters on the patcher's stack and leaves the rest to the original."""

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0, *args, **kwargs):
        family = models.family(self)
        if family is None:
            return original(self, patches, strength_patch, strength_model, *args, **kwargs)
        tensors, taken = _split(patches, family, strength_model)
        if taken:
            _extend(self, tensors, family, strength_patch)
        rest = {key: patch for key, patch in patches.items() if key not in taken}
        rest = weights.for_plain_layers(self, rest, family) if rest else rest
        applied = original(self, rest, strength_patch, strength_model, *args, **kwargs) if rest or not taken else []
        return [*applied, *taken]

    return add_patches


def taking_scheduled_loras(original):
    """``add_hook_patches`` that schedules the hook's LoRA on the stack; ComfyUI's own list keeps only its name."""

    def add_hook_patches(self, hook, patches, strength_patch=1.0, strength_model=1.0, *args, **kwargs):
        family = models.family(self)
        if family is None:
            return original(self, hook, patches, strength_patch, strength_model, *args, **kwargs)
        tensors, taken = _split(patches or {}, family, strength_model)
        raw = getattr(hook, "weights", None)
        if getattr(hook, "need_weight_init", False) and isinstance(raw, Mapping):
            # The file itself says more than what ComfyUI understood of it.
            tensors, taken = raw, [key for key in patches if key in taken]
        if tensors:
            scheduled = _kept_with(hook, tensors, family)
            stack.ensure(self).scheduled[hook.hook_ref] = stack.Entry(scheduled, strength_patch)
        rest = {key: patch for key, patch in (patches or {}).items() if key not in taken}
        rest = weights.for_plain_layers(self, rest, family) if rest else rest
        return [*original(self, hook, rest, strength_patch, strength_model, *args, **kwargs), *taken]

    return add_hook_patches


def _split(patches, family, strength_model: float) -> tuple[dict, list]:
    """(tensors of a LoRA file, keys of the patches that are in them)."""
    if strength_model != 1.0:
        # Model merging: it scales the weight itself, which a quantized layer cannot follow.
        return {}, []
    tensors, taken = {}, []
    for key, patch in patches.items():
        found = loose.as_file(key, patch, family)
        if found:
            tensors.update(found)
            taken.append(key)
    return tensors, taken


def _extend(patcher, tensors, family, strength: float) -> None:
    """Add ``tensors`` to the last LoRA that was made this way with this strength, else as a LoRA of their own."""
    own = stack.ensure(patcher)
    last = own.entries[-1] if own.entries else None
    if last is not None and last.strength == strength and last.lora.grow(tensors):
        return
    name = opened.name_of(tensors) or f"lora #{len(own.entries) + 1}"
    own.entries.append(stack.Entry(opened.Pieces(tensors, family, name), strength))


def _kept_with(hook, tensors, family) -> opened.Lora:
    """The LoRA of a hook, kept with the reference that all of the hook's clones share."""
    kept = vars(hook.hook_ref).setdefault("qpatch_loras", {})
    if family.name not in kept:
        kept[family.name] = opened.lora(tensors, family, fallback="scheduled lora")
    return kept[family.name]
