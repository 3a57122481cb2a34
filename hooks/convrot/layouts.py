"""Layout classes whose weights live in the rotated basis: the basis is a part of the tensor's type.

A comfy_kitchen ``QuantizedTensor`` names its layout class, and everything that reads or rewrites its values
goes through that class. Here is one class per base layout and group size, made when first asked for: its
``quantize`` rotates before the base quantizes, its ``dequantize`` un-rotates what the base gives. So LoRA
baking, low-VRAM patching, dynamic VRAM, casting, merging and saving, each of which dequantizes and
requantizes through the tensor, work in the basis of the model without knowing that there is another one.

``basis.py`` recognises such a weight from the tensor alone, and those that comfy_kitchen rotates by itself.
"""

from __future__ import annotations

import dataclasses

import torch
from comfy_kitchen.tensor import get_layout_class, register_layout_class

from . import operators
from .config import INT8_LAYOUT
from .rotation import GROUP_SIZES, rotate, rotate_channels


class RotatedLayout:
    """What the layout classes of this module have in common. Contract for other code:

    ``BASE_LAYOUT``      registered name of the base layout: the same data under it is the matrix W H as such.
    ``GROUP_SIZE``       elements of the input axis per block of the rotation.
    ``rotate(x)``        into the basis of the weight, and back: along the axis that meets the weight's inputs.
    ``ROTATES_OPERAND``  whether the base's product with the stored weight rotates its other operand itself.
    ``stored(qdata, params)``, ``quantize_stored(values, ...)``
                         between the data and the float values W H, both in the rotated basis: for whoever has
                         something to add that he can rotate himself (the factor of a LoRA).
    """

    BASE_LAYOUT: str
    GROUP_SIZE: int
    ROTATES_OPERAND = False

    @classmethod
    def rotate(cls, x: torch.Tensor) -> torch.Tensor:
        return rotate(x, cls.GROUP_SIZE)

    @classmethod
    def stored(cls, qdata, params) -> torch.Tensor:
        return super().dequantize(qdata, params)

    @classmethod
    def quantize_stored(cls, values, *args, **kwargs):
        return super().quantize(values, *args, **kwargs)

    @classmethod
    def quantize(cls, tensor, *args, **kwargs):
        # Rotated in the dtype of the tensor: products accumulate in float32, and one rounding to bfloat16
        # (2**-9) is far below the step of any format that is rotated.
        return cls.quantize_stored(cls.rotate(tensor), *args, **kwargs)

    @classmethod
    def dequantize(cls, qdata, params):
        return cls.rotate(cls.stored(qdata, params))


class RotatedINT8(RotatedLayout):
    """INT8 [out, in], one scale per row. The base rotates when it is told to; its parameters say so here too.

    What the base does by itself is left to it: its kernels rotate and quantize in one pass.
    """

    ROTATES_OPERAND = True

    @classmethod
    def _rotation(cls) -> dict:
        return {"convrot": True, "convrot_groupsize": cls.GROUP_SIZE}

    @classmethod
    def stored(cls, qdata, params):
        return super().stored(qdata, dataclasses.replace(params, convrot=False))

    @classmethod
    def quantize_stored(cls, values, *args, **kwargs):
        options = {"is_weight": True, "per_channel": True, "convrot": False}
        qdata, params = super().quantize_stored(values, *args, **{**kwargs, **options})
        return qdata, dataclasses.replace(params, **cls._rotation())

    @classmethod
    def quantize(cls, tensor, *args, **kwargs):
        options = {"is_weight": True, "per_channel": True, **cls._rotation()}
        return super(RotatedLayout, cls).quantize(tensor, *args, **{**kwargs, **options})

    @classmethod
    def dequantize(cls, qdata, params):
        return super(RotatedLayout, cls).dequantize(qdata, params)


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
    def quantize_stored(cls, values, *args, per_channel=True, **kwargs):
        shape = tuple(values.shape)
        options = {"is_weight": True, "per_channel": per_channel, "convrot": False}
        qdata, params = super().quantize_stored(values.reshape(shape[0], -1), *args, **{**kwargs, **options})
        scale = params.scale.reshape(-1, 1, 1, 1) if per_channel else params.scale
        # The parameters of the base say it as well: that is where ComfyUI looks when it writes a file.
        rotation = {"convrot": True, "convrot_groupsize": cls.GROUP_SIZE} if cls.GROUP_SIZE > 1 else {}
        return qdata.reshape(shape), dataclasses.replace(params, scale=scale, orig_shape=shape, **rotation)

    @classmethod
    def stored(cls, qdata, params):
        rows = qdata.shape[0]
        scale = params.scale.reshape(rows, 1) if params.scale.numel() > 1 else params.scale.reshape(())
        flat = dataclasses.replace(params, scale=scale, convrot=False, orig_shape=(rows, qdata[0].numel()))
        return super().stored(qdata.reshape(rows, -1), flat).reshape(qdata.shape)

    @classmethod
    def requantize_kwargs(cls, qtensor):
        return {"per_channel": qtensor._params.scale.numel() > 1}


def rotated(base: str, group_size: int) -> str:
    """The registered name of the layout of ``base`` (a registered name) rotated by ``group_size``."""
    kind = RotatedINT8 if base == INT8_LAYOUT else RotatedLayout
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
