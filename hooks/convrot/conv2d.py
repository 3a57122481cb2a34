"""Hook ``convrot-conv2d``, comfy.ops: INT8 Conv2d layers, plain and ConvRot, load, run, take LoRA and save.

ComfyUI's mixed-precision models know quantized Linears only; an INT8 convolution (SDXL packs have hundreds)
is read as if its integers were the weight. Here the class of operations that ``mixed_precision_ops`` makes
gets a Conv2d whose INT8 weight is a quantized tensor with a layout of its own (``layouts.ConvINT8``). A layer
without INT8 configuration loads as before.

The product is a float convolution with the dequantized weight, as comfy_kitchen has no INT8 one; which of the
two operands is rotated is decided at each call, see operators.py.
"""

from __future__ import annotations

import torch

from qpatch.finding import Finding, incompatible
from qpatch.patching import Wrap

from . import config, kitchen
from .loader import has_loader


def examine(module) -> Finding:
    reason = kitchen.unusable()
    if reason is not None:
        return incompatible(reason)
    if config.INT8 not in vars(module).get("QUANT_ALGOS", {}):
        return incompatible("this ComfyUI loads no INT8 files; 0.27 is the first release that does")
    if not has_loader(module) or "_quantized_apply" not in vars(module):
        return incompatible("comfy.ops loads and moves quantized layers in a way that this hook does not know")
    from . import probe

    return probe.conv2d(module)


def patches(module):
    yield Wrap(module, "mixed_precision_ops", lambda original: _with_conv2d(module, original))


def _with_conv2d(comfy_ops, original):
    def mixed_precision_ops(*args, **kwargs):
        made = original(*args, **kwargs)
        made.Conv2d = conv2d_class(comfy_ops, made)
        return made

    return mixed_precision_ops


def conv2d_class(comfy_ops, made) -> type:
    """A Conv2d for ``made``, a class of mixed-precision operations: ComfyUI's own, that can hold an INT8 weight."""

    class Conv2d(made.Conv2d):
        def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, *rest):
            weight = _taken(self, state_dict, prefix, made._compute_dtype)
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
            if weight is not None:
                self.quant_format, self.layout_type = config.INT8, weight._layout_cls
                self.weight = torch.nn.Parameter(weight, requires_grad=False)
                if f"{prefix}weight" in missing_keys:
                    missing_keys.remove(f"{prefix}weight")

        def state_dict(self, *args, destination=None, prefix="", **kwargs):
            if getattr(self, "layout_type", None) is None:
                return super().state_dict(*args, destination=destination, prefix=prefix, **kwargs)
            sd = destination if destination is not None else {}
            return comfy_ops._quantized_weight_state_dict(self, sd, prefix)

        def _apply(self, fn, recurse=True):
            return comfy_ops._quantized_apply(self, fn, recurse)

        # What LoRA baking calls: for a Linear's weight and for this one the same.
        convert_weight = made.Linear.convert_weight
        set_weight = made.Linear.set_weight

    return Conv2d


def _taken(module, state_dict: dict, prefix: str, dtype: torch.dtype):
    """The INT8 weight of ``module``, its entries taken out of ``state_dict``; None where ComfyUI is to load it."""
    from . import adoption

    declared = adoption.announce(module, state_dict, prefix)
    if declared is None or declared.format != config.INT8:
        return None
    with adoption.careful("cannot be loaded as an INT8 convolution and will give noise", prefix):
        weight, scale = (state_dict.get(prefix + name) for name in ("weight", "weight_scale"))
        tensor = _quantized(module, weight, scale, declared.group_size or 1, dtype)
        for name in ("weight", "weight_scale", "comfy_quant"):
            del state_dict[prefix + name]
        return tensor
    return None


def _quantized(module, weight, scale, size: int, dtype: torch.dtype):
    """The entries of a file as a tensor; ValueError where they are not an INT8 weight of ``module``."""
    from comfy_kitchen.tensor import QuantizedTensor, get_layout_class

    from . import adoption, layouts

    reason = _unfit(module, weight, scale) or (adoption.unfit(size, weight.shape[1]) if size > 1 else None)
    if reason is not None:
        raise ValueError(reason)
    device, layout = module.weight.device, layouts.convolution(size)
    rotated = {"convrot": True, "convrot_groupsize": size} if size > 1 else {}
    params = get_layout_class(layout).Params(
        scale=scale.to(device).reshape((-1, 1, 1, 1) if scale.numel() > 1 else ()),
        orig_dtype=dtype, orig_shape=tuple(weight.shape), **rotated)
    return QuantizedTensor(weight.to(device), layout, params)


def _unfit(module, weight, scale) -> str | None:
    """Why the entries of a file are not an INT8 weight of ``module``; None if they are."""
    if weight is None or scale is None:
        return "the file has no weight or no weight_scale"
    if weight.dtype != torch.int8 or weight.shape != module.weight.shape:
        return f"its weight is {weight.dtype} {tuple(weight.shape)}, expected int8 {tuple(module.weight.shape)}"
    if scale.numel() not in (1, weight.shape[0]):
        return f"it has {scale.numel()} scales, expected 1 or {weight.shape[0]}"
    return None
