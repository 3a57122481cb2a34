"""Adding LoRA to rotated weights for good, and taking it out again: what hook ``convrot-bake`` does at load."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from qpatch import log, toggles
from qpatch.hooks.adapter_class import is_comfyui_s
from qpatch.lora.progress import track

from .basis import basis, requantized, stored_values, unwrapped, with_stored_values

#: Name of the model's own record of what is baked into it: key -> Baked.
RECORD = "qpatch_convrot_baked"


@dataclass(frozen=True)
class Baked:
    """``original`` was replaced by ``replacement`` for the set of LoRAs that ComfyUI calls ``patches``."""

    original: torch.nn.Parameter
    replacement: torch.nn.Parameter
    patches: object


def original_of(model, key: str, weight):
    """The weight that ``key`` had before ``weight`` was baked; ``weight`` itself if it was not."""
    entry = vars(model).get(RECORD, {}).get(key)
    # Someone may have put another weight there since; then that is the weight.
    return entry.original if entry is not None and entry.replacement is weight else weight


def restore(model, keep=None) -> int:
    """Put the originals back, but for those baked for the set of LoRAs ``keep``; how many were put back."""
    record = vars(model).get(RECORD, {})
    gone = [key for key, entry in record.items() if keep is None or entry.patches != keep]
    for key in gone:
        entry, layer = record.pop(key), _layer(model, key)
        if layer.weight is entry.replacement:
            _put(layer, entry.original)
    return len(gone)


def bake(patcher, model_patcher) -> int:
    """Bake the patches of ``patcher`` (a ModelPatcherDynamic that has just loaded) into its rotated weights.

    Weights that are baked for the same patches already stay as they are. A weight that cannot be baked is left
    to ComfyUI, which then adds its LoRA at each cast. Returns how many were baked now.
    """
    start, count = time.perf_counter(), 0
    record = vars(patcher.model).setdefault(RECORD, {}) if patcher.patches else {}
    pending = list(_not_baked(patcher, record))
    for key, layer in track(pending, len(pending), "convrot-bake"):
        try:
            seed = model_patcher.comfy.utils.string_to_seed(key)
            weight = baked(unwrapped(layer.weight), key, patcher.patches, seed, patcher.load_device, model_patcher)
        except Exception as error:
            if toggles.strict():
                raise
            log.warning(f"convrot-bake: {key} is left to ComfyUI: {type(error).__name__}: {error}")
            continue
        replacement = torch.nn.Parameter(weight.to(device=layer.weight.device), requires_grad=False)
        record[key] = Baked(layer.weight, replacement, patcher.patches_uuid)
        _put(layer, replacement)
        layer.weight_lowvram_function = None
        count += 1
    if count:
        log.info(f"convrot-bake: LoRA added to {count} ConvRot weights in {time.perf_counter() - start:.1f} s")
    return count


def _not_baked(patcher, record: dict):
    """(key, layer) of each rotated weight that is to be baked; those that are lose the function of each cast.

    Without that function, ComfyUI has put a patched weight there itself (small or resized layers).
    """
    for key in patcher.patches:
        layer = _layer(patcher.model, key) if key.endswith(".weight") else None
        if layer is None or getattr(layer, "weight_lowvram_function", None) is None:
            continue
        if key in record and record[key].replacement is layer.weight:
            layer.weight_lowvram_function = None
        elif basis(layer.weight) is not None:
            yield key, layer


def baked(weight, key: str, patches: dict, seed: int, device, model_patcher):
    """``weight`` (a rotated QuantizedTensor) with ``patches[key]``, requantized; on ``device``."""
    weight = weight.to(device=device)
    terms = [rotated_term(patch, weight) for patch in patches[key]]
    values = stored_values(weight) if None not in terms else None
    if values is None:
        dense = model_patcher.comfy.lora.calculate_weight(patches[key], weight.dequantize().float(), key)
        return requantized(weight, dense, seed)
    for rows, up, down in terms:
        values[rows].flatten(1).addmm_(up, down)
    return with_stored_values(weight, values, seed)


def rotated_term(patch, weight) -> tuple | None:
    """(rows, up, down), in float32, on the device and in the basis of ``weight``, for a patch of ComfyUI's.

    The patch adds ``up @ down`` to ``rows`` (a slice) of the stored values; up: [out, rank], down: [rank, rest].
    None if it is anything but a plain LoRA on whole rows of a weight of this shape.
    """
    strength, adapter, strength_model, offset, function = patch
    weights = getattr(adapter, "weights", None)
    if getattr(adapter, "name", None) != "lora" or strength_model != 1.0 or function is not None or len(weights) != 6:
        return None
    if not is_comfyui_s(adapter):
        return None
    up, down, alpha, *others = weights
    if any(other is not None for other in others) or (offset is not None and offset[0] != 0):
        return None
    rows = slice(0, weight.shape[0]) if offset is None else slice(offset[1], offset[1] + offset[2])
    if up.shape[0] != rows.stop - rows.start or down[0].numel() != weight.shape[1:].numel():
        return None
    scale = strength * (1.0 if alpha is None else float(alpha) / down.shape[0])
    up, down = (factor.to(device=weight.device, dtype=torch.float32) for factor in (up, down))
    down = basis(weight).rotate(down.reshape(down.shape[0], *weight.shape[1:]))
    return rows, up.flatten(1) * scale, down.flatten(1)


def _layer(model, key: str):
    return model.get_submodule(key.rpartition(".")[0])


def _put(layer, weight) -> None:
    layer.weight = weight
    # What dynamic VRAM holds of the layer on the device is out of date.
    layer._v_signature = None
