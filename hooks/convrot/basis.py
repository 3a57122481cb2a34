"""Recognising a rotated weight from the tensor alone, and working on it in its own basis.

For the other hooks: nothing here needs the module that holds the weight, or knows ComfyUI.
"""

from __future__ import annotations

import dataclasses

import torch
from comfy_kitchen.tensor import QuantizedTensor, get_layout_class

from . import layouts
from .config import INT8_LAYOUT
from .rotation import rotate, rotate_channels


@dataclasses.dataclass(frozen=True)
class Basis:
    """Where a weight's stored values live: its input axis is rotated by blocks of ``group_size``.

    ``layout``: the name of the tensor's layout. ``base``: that of the layout under which the same data would
    be the rotated matrix itself; the same name where comfy_kitchen rotates by itself. ``axis``: the input axis
    of the weight, -1, or 1 for a convolution.
    """

    group_size: int
    layout: str
    base: str
    axis: int = -1

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` into this basis or back, along the axis that meets the weight's inputs; shape and dtype kept.

        For a matrix that is the last one (of an activation, of the down factor of a LoRA); for a convolution
        axis 1 (of an image [N, C, H, W], of a down factor [rank, in, h, w]).
        """
        return rotate_channels(x, self.group_size) if self.axis == 1 else rotate(x, self.group_size)


def basis(weight) -> Basis | None:
    """The rotated basis that ``weight`` is stored in; None if in none, or not a quantized tensor.

    Knows the layouts of layouts.py and those that comfy_kitchen rotates itself (INT8 with ``convrot`` in its
    parameters, ConvRot W4A4 and W4A8). ``weight.dequantize()`` is in the model's own basis in every case.
    """
    weight = unwrapped(weight)
    if weight is None:
        return None
    layout, name = get_layout_class(weight._layout_cls), weight._layout_cls
    if issubclass(layout, layouts.RotatedLayout):
        axis = 1 if issubclass(layout, layouts.ConvINT8) else -1
        return Basis(layout.GROUP_SIZE, name, layout.BASE_LAYOUT, axis) if layout.GROUP_SIZE > 1 else None
    size = getattr(weight._params, "convrot_groupsize", None)
    if size is None or not getattr(weight._params, "convrot", True):
        return None
    return Basis(int(size), name, name)


def unwrapped(weight) -> QuantizedTensor | None:
    """The QuantizedTensor that ``weight`` is or, in a Parameter of some torch versions, holds; else None."""
    if isinstance(weight, QuantizedTensor):
        return weight
    held = getattr(weight, "data", None)
    return held if isinstance(held, QuantizedTensor) else None


def relabelled(weight: QuantizedTensor, layout: str) -> QuantizedTensor:
    """The same data and parameters under the layout named ``layout``; nothing is copied."""
    return QuantizedTensor(weight._qdata, layout, weight._params)


def stored_values(weight: QuantizedTensor) -> torch.Tensor | None:
    """W H in float32, in the logical shape of ``weight``; None where the layout offers no way to it."""
    layout = _rotated_layout(weight)
    if layout is None:
        return None
    params = dataclasses.replace(weight._params, orig_dtype=torch.float32)
    values = layout.stored(weight._qdata.contiguous(), params)
    return values[tuple(slice(0, size) for size in weight.shape)]


def with_stored_values(weight: QuantizedTensor, values: torch.Tensor, seed: int = 0) -> QuantizedTensor:
    """A weight like ``weight`` (layout, dtype, kind of scales) whose stored values are ``values``, W' H.

    values: float, the shape of ``weight``, in the rotated basis. ``seed`` > 0 rounds stochastically.
    """
    layout = _rotated_layout(weight)
    kept = layout.requantize_kwargs(weight) if issubclass(layout, layouts.ConvINT8) else {}
    qdata, params = layout.quantize_stored(values, scale="recalculate", stochastic_rounding=seed, **kept)
    params = dataclasses.replace(params, orig_dtype=weight._params.orig_dtype)
    return QuantizedTensor(qdata, weight._layout_cls, params)


def requantized(weight: QuantizedTensor, values: torch.Tensor, seed: int = 0) -> QuantizedTensor:
    """A weight like ``weight`` whose values, in the model's basis, are ``values``."""
    options = {"scale": "recalculate", "stochastic_rounding": seed}
    # Not in the oldest releases, whose layouts have no options to preserve.
    again = getattr(weight, "requantize_from_float", None)
    if again is None:
        return QuantizedTensor.from_float(values, weight._layout_cls, **options).to(weight.dtype)
    return again(values, **options).to(weight.dtype)


def _rotated_layout(weight: QuantizedTensor) -> type | None:
    layout = get_layout_class(weight._layout_cls)
    if issubclass(layout, layouts.RotatedLayout):
        return layout
    found = basis(weight)
    if found is None or weight._layout_cls != INT8_LAYOUT:
        return None
    # What comfy_kitchen's own INT8 layout stores is what this one stores.
    return get_layout_class(layouts.rotated(INT8_LAYOUT, found.group_size))
