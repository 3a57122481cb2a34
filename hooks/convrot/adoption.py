"""Giving a layer that ComfyUI has just loaded the rotated layout that its configuration declares.

Used by the hooks on ComfyUI's loaders. Nothing here raises for what a file says: a layer that cannot be given
its basis stays as ComfyUI loads it, and the log says which and why, since its output will be noise.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from comfy_kitchen.tensor import get_layout_class

from qpatch import log, toggles

from . import basis, config, layouts
from .rotation import GROUP_SIZES


def announce(module, state_dict: dict, prefix: str) -> config.Declaration | None:
    """What the layer's configuration declares, before it is loaded; None without one, or if it cannot be read.

    Puts the configuration into the form that ComfyUI reads, and the logical shape that it gives onto a
    ``module`` that was built from the packed one (a model built by looking at packed shapes has half as many
    inputs as the layer).
    """
    raw = state_dict.get(f"{prefix}comfy_quant")
    if raw is None:
        return None
    with careful("left to ComfyUI", prefix):
        settings = config.decode(raw)
        declared, shape = config.declaration(settings), config.shape(settings)
        if not config.stock_reads(raw, settings):
            state_dict[f"{prefix}comfy_quant"] = config.encode(config.plain(settings))
        if declared.format == config.NVFP4:
            _correct_shape(module, state_dict.get(f"{prefix}weight"), shape, prefix)
        return declared
    return None


def adopt(module, group_size: int, layout: str, prefix: str) -> None:
    """Put the weight of ``module``, loaded in the layout named ``layout``, under the rotated one of ``group_size``."""
    with careful("stays un-rotated and will give noise", prefix):
        weight = basis.unwrapped(getattr(module, "weight", None))
        if weight is None or weight._layout_cls != layout:
            return
        reason = unfit(group_size, weight.shape[-1])
        if reason is not None:
            raise ValueError(reason)
        name = layouts.rotated(layout, group_size)
        module.weight = torch.nn.Parameter(basis.relabelled(weight, name), requires_grad=False)
        # Activations are quantized in the layout that the module names.
        module.layout_type = name


@contextmanager
def careful(consequence: str, prefix: str):
    """Errors end here, as a line of the log: nothing of ours may stop a model from loading (but QPATCH_STRICT=1)."""
    try:
        yield
    except Exception as error:
        if toggles.strict():
            raise
        complain(f"{consequence}: {error}", prefix)


def unfit(group_size: int, features: int) -> str | None:
    """Why ``features`` inputs cannot have been rotated in groups of ``group_size``; None if they can."""
    if group_size not in GROUP_SIZES:
        return f"its ConvRot group size is {group_size}, expected one of {', '.join(map(str, GROUP_SIZES))}"
    if features % group_size:
        return f"its ConvRot group size {group_size} does not divide its {features} inputs"
    return None


def _correct_shape(module, stored, shape, prefix: str) -> None:
    built = getattr(module, "out_features", None), getattr(module, "in_features", None)
    current = getattr(module, "_orig_shape", built)
    if shape is None or len(shape) != 2 or tuple(current) == shape or not isinstance(stored, torch.Tensor):
        return
    expected = get_layout_class(config.NVFP4_LAYOUT).get_storage_shape(shape)
    if tuple(stored.shape) != tuple(expected):
        complain(f"keeps the shape {tuple(current)}: comfy_quant says {shape}, which is stored as {tuple(expected)}, "
                  f"but the file has {tuple(stored.shape)}", prefix)
        return
    module._orig_shape = shape
    module.out_features, module.in_features = shape


#: What has been said: a model has hundreds of layers with the same complaint.
_said: set[str] = set()


def complain(text: str, prefix: str) -> None:
    if text not in _said:
        _said.add(text)
        log.warning(f"layer {prefix.rstrip('.') or '(unnamed)'} {text}. Others like it are not listed.")
