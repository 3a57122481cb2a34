"""Layout classes whose weights live in the rotated basis: the basis is a part of the tensor's type.

A comfy_kitchen ``QuantizedTensor`` names its layout class, and everything that reads or rewrites its values
goes through that class. Here is one class per base layout and group size, made when first asked for: its
``quantize`` rotates before the base quantizes, its ``dequantize`` un-rotates what the base gives. So LoRA
baking, low-VRAM patching, dynamic VRAM, casting, merging and saving, each of which dequantizes and
requantizes through the tensor, work in the basis of the model without knowing that there is another one.

For code that wants to recognise such a weight from the tensor alone, :func:`basis` answers for these layouts
and for those that comfy_kitchen rotates itself.
"""

from __future__ import annotations

import dataclasses

import torch
from comfy_kitchen.tensor import QuantizedTensor, get_layout_class, register_layout_class

from . import operators
from .config import INT8_LAYOUT
from .rotation import GROUP_SIZES, rotate, rotate_channels


class RotatedLayout:
    """What the layout classes of this module have in common. Contract for other code:

    ``BASE_LAYOUT``      registered name of the base layout: the same data under it is the matrix W H as such.
    ``GROUP_SIZE``       elements of the input axis per block of the rotation.
    ``rotate(x)``        into the basis of the weight, and back: along the axis that meets the weight's inputs.
    ``ROTATES_OPERAND``  whether the base's product with the stored weight rotates its other operand itself.
    """

    BASE_LAYOUT: str
    GROUP_SIZE: int
    ROTATES_OPERAND = False

    @classmethod
    def rotate(cls, x: torch.Tensor) -> torch.Tensor:
        return rotate(x, cls.GROUP_SIZE)


class RotatedMatrix(RotatedLayout):
    """A weight [out, in] (or a bank of them), or an activation [rows, in], of a base that knows no rotation."""

    @classmethod
    def quantize(cls, tensor, *args, **kwargs):
        # Rotated in the dtype of the tensor: products accumulate in float32, and one rounding to bfloat16
        # (2**-9) is far below the step of any format that is rotated.
        return super().quantize(cls.rotate(tensor), *args, **kwargs)

    @classmethod
    def dequantize(cls, qdata, params):
        return cls.rotate(super().dequantize(qdata, params))


class RotatedINT8(RotatedLayout):
    """INT8 [out, in], one scale per row. The base rotates when it is told to; this class always tells it."""

    ROTATES_OPERAND = True

    @classmethod
    def quantize(cls, tensor, *args, **kwargs):
        options = {"is_weight": True, "per_channel": True, "convrot": True, "convrot_groupsize": cls.GROUP_SIZE}
        return super().quantize(tensor, *args, **{**kwargs, **options})


class ConvINT8(RotatedLayout):
    """INT8 convolution weight [out, in, height, width], one scale [out, 1, 1, 1] per output channel.

    Rotated along the input channels; with GROUP_SIZE 1 not at all (packs leave layers plain whose channels no
    group size divides, with one scale for the whole weight). comfy_kitchen has no INT8 convolution and rotates
    matrices only, so the base sees the weight as [out, in * height * width] and only converts numbers.
    """

    @classmethod
    def rotate(cls, x):
        return x if cls.GROUP_SIZE == 1 else rotate_channels(x, cls.GROUP_SIZE)

    @classmethod
    def quantize(cls, tensor, *args, per_channel=True, **kwargs):
        shape = tuple(tensor.shape)
        options = {"is_weight": True, "per_channel": per_channel, "convrot": False}
        flat = cls.rotate(tensor).reshape(shape[0], -1)
        qdata, params = super().quantize(flat, *args, **{**kwargs, **options})
        scale = params.scale.reshape(-1, 1, 1, 1) if per_channel else params.scale
        rotation = {"convrot": True, "convrot_groupsize": cls.GROUP_SIZE} if cls.GROUP_SIZE > 1 else {}
        return qdata.reshape(shape), dataclasses.replace(params, scale=scale, orig_shape=shape, **rotation)

    @classmethod
    def dequantize(cls, qdata, params):
        return cls.rotate(cls.stored(qdata, params))

    @classmethod
    def stored(cls, qdata, params) -> torch.Tensor:
        """The float weight in the basis it is stored in, for a product with a rotated activation."""
        rows = qdata.shape[0]
        scale = params.scale.reshape(rows, 1) if params.scale.numel() > 1 else params.scale.reshape(())
        flat = dataclasses.replace(params, scale=scale, convrot=False, orig_shape=(rows, qdata[0].numel()))
        return super().dequantize(qdata.reshape(rows, -1), flat).reshape(qdata.shape)

    @classmethod
    def requantize_kwargs(cls, qtensor):
        return {"per_channel": qtensor._params.scale.numel() > 1}


def rotated(base: str, group_size: int) -> str:
    """The registered name of the layout of ``base`` (a registered name) rotated by ``group_size``."""
    kind = RotatedINT8 if base == INT8_LAYOUT else RotatedMatrix
    return _registered(f"{base}ConvRot{group_size}", kind, base, group_size)


def convolution(group_size: int) -> str:
    """The registered name of the INT8 layout of convolution weights; ``group_size`` 1 is not rotated."""
    return _registered(f"Conv2dINT8Layout{f'ConvRot{group_size}' if group_size > 1 else ''}",
                       ConvINT8, INT8_LAYOUT, group_size)


def _registered(name: str, kind: type, base: str, group_size: int) -> str:
    if group_size not in (*GROUP_SIZES, *((1,) if kind is ConvINT8 else ())):
        raise ValueError(f"ConvRot group size {group_size}: expected one of {', '.join(map(str, GROUP_SIZES))}")
    base_class = get_layout_class(base)
    try:
        if base_class in get_layout_class(name).__mro__:
            return name
    except KeyError:
        pass
    layout = type(name, (kind, base_class), {"BASE_LAYOUT": base, "GROUP_SIZE": group_size, "__module__": __name__})
    operators.register(layout, base_class)
    register_layout_class(name, layout)
    return name


@dataclasses.dataclass(frozen=True)
class Basis:
    """Where a weight's stored values live: rotated by blocks of ``group_size`` along its input axis.

    ``layout``: the name of the tensor's layout; ``base``: that of the layout without the rotation.
    """

    group_size: int
    layout: str
    base: str

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] into this basis; for a 4-D convolution factor along its channel axis. Its own inverse."""
        return rotate_channels(x, self.group_size) if x.dim() == 4 else rotate(x, self.group_size)


def basis(weight) -> Basis | None:
    """The rotated basis that ``weight`` is stored in, read from the tensor; None if in none, or not quantized.

    Knows the layouts of this module and those that comfy_kitchen rotates itself (INT8 with ``convrot`` in its
    parameters, ConvRot W4A4 and W4A8). ``weight.dequantize()`` is in the model's own basis in every case.
    """
    weight = unwrapped(weight)
    if weight is None:
        return None
    layout, params = get_layout_class(weight._layout_cls), weight._params
    if issubclass(layout, RotatedLayout):
        return Basis(layout.GROUP_SIZE, weight._layout_cls, layout.BASE_LAYOUT) if layout.GROUP_SIZE > 1 else None
    size = getattr(params, "convrot_groupsize", None)
    if size is None or not getattr(params, "convrot", True):
        return None
    return Basis(int(size), weight._layout_cls, weight._layout_cls)


def unwrapped(weight):
    """The QuantizedTensor that ``weight`` is or, in a Parameter of some torch versions, holds; else None."""
    if isinstance(weight, QuantizedTensor):
        return weight
    held = getattr(weight, "data", None)
    return held if isinstance(held, QuantizedTensor) else None


def relabelled(weight: QuantizedTensor, layout: str) -> QuantizedTensor:
    """The same data and parameters under the layout named ``layout``; nothing is copied."""
    return QuantizedTensor(weight._qdata, layout, weight._params)
