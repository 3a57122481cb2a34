"""What the installed ComfyUI does with a rotated layer, found by loading a tiny one into its own classes."""

from __future__ import annotations

import torch
from comfy_kitchen.tensor import QuantizedTensor

from qpatch.finding import Finding, incompatible, needed, not_needed

from . import basis, config, layouts

_GROUP_SIZE = 16
#: Relative error from which a weight counts as wrong. Right ones are at 0.1 (NVFP4) and 0.01 (INT8), rotated
#: ones at 1.4; what comes back without its rotation, but is right, is told from its parameters.
_WRONG = 0.3


def nvfp4(comfy_ops) -> Finding:
    """Whether comfy.ops un-rotates NVFP4 ConvRot weights, and whether our layout would, with this comfy_kitchen."""
    weight, state_dict = _layer(config.NVFP4_LAYOUT, config.NVFP4)
    try:
        works = _quantized(weight, config.NVFP4_LAYOUT).dequantize()
        loaded = _loaded(comfy_ops, state_dict).weight.dequantize()
    except Exception as error:
        return incompatible(f"a small NVFP4 ConvRot layer could not be loaded: {type(error).__name__}: {error}")
    if _error(works, weight) > _WRONG:
        return incompatible("comfy_kitchen's NVFP4 layout gives wrong values when it is made to rotate")
    if _error(loaded, weight) < _WRONG:
        return not_needed("this ComfyUI un-rotates NVFP4 ConvRot weights by itself")
    return needed("this ComfyUI loads rotated NVFP4 weights as if they were not")


def int8(comfy_ops) -> Finding:
    """Whether an INT8 ConvRot Linear stays one when its weight is set, as LoRA baking does."""
    weight, state_dict = _layer(config.INT8_LAYOUT, config.INT8)
    try:
        layer = _loaded(comfy_ops, state_dict)
        layer.set_weight(layer.convert_weight(layer.weight), seed=0)
    except Exception as error:
        return incompatible(f"a small INT8 ConvRot layer could not be loaded and set: {type(error).__name__}: {error}")
    kept = basis.basis(layer.weight)
    if kept is not None and kept.group_size == _GROUP_SIZE and _error(layer.weight.dequantize(), weight) < _WRONG:
        return not_needed("this ComfyUI keeps the rotation of an INT8 weight when it is requantized")
    return needed("this ComfyUI drops the rotation of an INT8 weight when it is requantized, as LoRA baking does")


def conv2d(comfy_ops) -> Finding:
    """Whether an INT8 ConvRot Conv2d layer comes out of comfy.ops as the convolution that it is."""
    weight, _ = _layer(config.INT8_LAYOUT, config.INT8)
    weight = weight[:, :, None, None]
    stored = QuantizedTensor.from_float(weight, layouts.convolution(_GROUP_SIZE))
    settings = {"format": config.INT8, "convrot": True, "convrot_groupsize": _GROUP_SIZE}
    state_dict = {**stored.state_dict("weight"), "comfy_quant": config.encode(settings)}
    made = comfy_ops.mixed_precision_ops(compute_dtype=torch.float32)
    image = torch.eye(16)[:, :, None, None]
    try:
        layer = made.Conv2d(16, 16, 1, bias=False)
        layer._load_from_state_dict(state_dict, "", {}, False, [], [], [])
        with torch.no_grad():
            found = layer(image)
    except Exception as error:
        found, reason = torch.zeros(16, 16, 1, 1), f" ({type(error).__name__})"
    else:
        reason = ""
    if _error(found, weight.transpose(0, 1)) < _WRONG:
        return not_needed("this ComfyUI loads INT8 ConvRot convolutions by itself")
    if "Conv2d" in vars(made):
        return incompatible(f"this ComfyUI has a quantized Conv2d of its own, which does not read INT8 ConvRot{reason}")
    return needed("this ComfyUI takes the integers of an INT8 convolution for its weight")


def _layer(layout: str, format: str) -> tuple[torch.Tensor, dict]:
    """A float weight [16, 16] and its ConvRot layer as a file has it."""
    # Not random: a probe must not move the generators of the program that imports ComfyUI. Not smooth either:
    # a constant is an eigenvector of the matrix, and a slope nearly one.
    weight = (torch.arange(256) * 37 % 101).reshape(16, 16) / 50 - 1
    settings = {"format": format, "convrot": True, "convrot_groupsize": _GROUP_SIZE}
    return weight, {**_quantized(weight, layout).state_dict("weight"), "comfy_quant": config.encode(settings)}


def _quantized(weight: torch.Tensor, layout: str) -> QuantizedTensor:
    return QuantizedTensor.from_float(weight, layouts.rotated(layout, _GROUP_SIZE))


def _loaded(comfy_ops, state_dict: dict):
    layer = comfy_ops.mixed_precision_ops(compute_dtype=torch.float32).Linear(16, 16, bias=False)
    layer._load_from_state_dict(dict(state_dict), "", {}, True, [], [], [])
    return layer


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
