"""Hook ``convrot``, comfy.model_detection: a model is recognised by the shapes of its layers, not of their storage.

NVFP4 stores two inputs in one byte. ComfyUI reads sizes off the tensors of the file, so an SDXL UNet whose
cross-attention or label embedding is NVFP4 looks like another architecture with half as many inputs, and is
refused or built wrong. Here the detection is shown the logical shapes: from the configuration of the layer
where it gives them (padding cannot be told from the storage), else twice the stored width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qpatch.finding import Finding, incompatible, needed, not_needed
from qpatch.patching import Wrap

from . import config


def examine(module) -> Finding:
    probe = vars(module).get("calculate_transformer_depth")
    if probe is None:
        return incompatible("comfy.model_detection has no calculate_transformer_depth")
    block = {
        "1.proj_in.weight": torch.zeros(1, 1),
        "1.transformer_blocks.0.attn2.to_k.weight": torch.zeros(16, 16, dtype=torch.uint8),
        "1.transformer_blocks.0.attn2.to_k.comfy_quant": config.encode({"format": config.NVFP4}),
    }
    try:
        width = probe("", list(block), block)[1]
    except Exception as error:
        return incompatible(f"calculate_transformer_depth does not read a small block: {type(error).__name__}: {error}")
    if width == 32:
        return not_needed("this ComfyUI takes the logical shapes of NVFP4 layers")
    return needed("this ComfyUI takes the packed shape of an NVFP4 layer for its size")


def patches(module):
    yield Wrap(module, "detect_unet_config", _with_logical_shapes)


def _with_logical_shapes(original):
    def detect_unet_config(state_dict, key_prefix, *args, **kwargs):
        return original(logical_shapes(state_dict, key_prefix), key_prefix, *args, **kwargs)

    return detect_unet_config


def logical_shapes(state_dict: Mapping, prefix: str) -> Mapping:
    """``state_dict`` with each NVFP4 weight under ``prefix`` replaced by a tensor of the layer's own shape.

    The replacements own one element each; a dict without NVFP4 weights is returned as it is.
    """
    unpacked = {}
    for key in state_dict:
        if key.startswith(prefix) and key.endswith(".comfy_quant"):
            name = key[:-len("comfy_quant")] + "weight"
            shape = _logical_shape(state_dict[key], state_dict.get(name))
            if shape is not None:
                unpacked[name] = torch.zeros(1).expand(shape)
    return {**state_dict, **unpacked} if unpacked else state_dict


def _logical_shape(raw, weight) -> tuple[int, ...] | None:
    try:
        settings = config.decode(raw)
        shape = config.shape(settings)
    except (ValueError, TypeError):
        return None
    if settings.get("format") != config.NVFP4 or not isinstance(weight, torch.Tensor) or weight.dtype != torch.uint8:
        return None
    return shape or (*weight.shape[:-1], weight.shape[-1] * 2)
