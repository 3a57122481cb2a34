"""Products with a rotated weight, for torch's operator dispatch.

comfy_kitchen looks a handler up along the bases of a tensor's layout class, but its handlers name their own
layout: the result of ``t()`` loses a subclass, and the INT8 ones refuse it. So each rotated layout has
handlers of its own. Under inference mode ``F.linear`` arrives as ``aten.linear`` and ``F.conv2d`` as
``aten.conv2d``; under no_grad and autograd they arrive as ``aten.t`` with ``aten.mm`` or ``aten.addmm``, and
as ``aten.convolution``.

x W^T = (x H) (W H)^T. Where both operands are in the same basis, the base's handler multiplies what is stored.
Where x is a float tensor, x is rotated and the base multiplies with the stored matrix, unless x is the larger
of the two: then the weight is un-rotated. Either way it is the smaller one that is rotated. (Measured for the
INT8 convolutions of SDXL: rotating a 1280 x 32 x 32 image takes 3 % of the convolution's time, un-rotating its
weight at every forward 30 %; at 320 x 64 x 64 both take 2 to 4 %. Un-rotating once and for all would mean a
float weight of twice the size, or a second quantization of it.)

Everything else dequantizes, and thereby un-rotates.
"""

from __future__ import annotations

import torch
from comfy_kitchen.tensor import QuantizedTensor, base, get_layout_class, register_layout_op
from comfy_kitchen.tensor.base import dequantize_args

aten = torch.ops.aten


def register(layout: type, parent: type) -> None:
    """Give ``layout`` its handlers, and a plain one for every other operator that ``parent`` handles."""
    for operator, handler in _HANDLERS.items():
        register_layout_op(operator, layout)(handler)
    for operator, handlers in getattr(base, "_LAYOUT_DISPATCH_TABLE", {}).items():
        if operator not in _HANDLERS and any(ancestor in handlers for ancestor in parent.__mro__):
            register_layout_op(operator, layout)(_dequantized(operator))


def _dequantized(operator):
    """A handler that knows nothing of the stored values, for operators that later releases may add."""
    return lambda qt, args, kwargs: operator(*dequantize_args(args), **dequantize_args(kwargs))


def _transpose(qt, args, kwargs):
    weight = args[0]
    flipped = aten.t.default(_stored(weight))
    return QuantizedTensor(flipped._qdata, weight._layout_cls, flipped._params)


def _linear(qt, args, kwargs):
    x, weight = _in_one_basis(args[0], args[1])
    return torch.nn.functional.linear(x, weight, *args[2:])


def _mm(qt, args, kwargs):
    x, weight = args
    if not _is_transposed(weight):
        return aten.mm.default(*dequantize_args(args), **kwargs)
    return _linear(qt, (x, aten.t.default(weight)), {})


def _addmm(qt, args, kwargs):
    bias, x, weight = args
    scaled = kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1
    if scaled or bias.dim() != 1 or not _is_transposed(weight):
        return aten.addmm.default(*dequantize_args(args), **kwargs)
    return _linear(qt, (x, aten.t.default(weight), bias), {})


def _convolve(operator):
    def handler(qt, args, kwargs):
        x, weight = args[0], args[1]
        if not _is_rotated(weight) or isinstance(x, QuantizedTensor) or x.numel() > weight.numel():
            return operator(*dequantize_args(args), **kwargs)
        layout = get_layout_class(weight._layout_cls)
        return operator(layout.rotate(x), layout.stored(weight._qdata, weight._params), *args[2:], **kwargs)

    return handler


_HANDLERS = {
    aten.t.default: _transpose,
    aten.linear.default: _linear,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.conv2d.default: _convolve(aten.conv2d.default),
    aten.convolution.default: _convolve(aten.convolution.default),
}


def _is_rotated(tensor) -> bool:
    return isinstance(tensor, QuantizedTensor) and hasattr(get_layout_class(tensor._layout_cls), "BASE_LAYOUT")


def _is_transposed(tensor) -> bool:
    return isinstance(tensor, QuantizedTensor) and getattr(tensor._params, "transposed", False)


def _in_one_basis(x, weight):
    """(x, weight) such that the base's product of the two is the product that was asked for."""
    if not _is_rotated(weight) or _is_transposed(weight) or _is_transposed(x):
        return dequantize_args((x, weight))
    if isinstance(x, QuantizedTensor):
        # Two layouts are two bases; in the same one, what is stored may be multiplied as it is.
        if x._layout_cls != weight._layout_cls:
            return dequantize_args((x, weight))
        return _stored(x), _stored(weight)
    layout = get_layout_class(weight._layout_cls)
    if layout.ROTATES_OPERAND:
        return x, _stored(weight)
    if x.numel() > weight.numel():
        return x, weight.dequantize()
    return layout.rotate(x), _stored(weight)


def _stored(tensor: QuantizedTensor) -> QuantizedTensor:
    """The stored matrix, W H, as a tensor of the base layout."""
    return QuantizedTensor(tensor._qdata, get_layout_class(tensor._layout_cls).BASE_LAYOUT, tensor._params)
