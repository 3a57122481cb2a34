"""Hook ``comfy-compat-quant-copy``: ``copy.deepcopy`` of a layer with a quantized weight.

torch copies a tensor subclass by its storage, and a quantized tensor has none of its own, so copying a
ControlNet or a block with such weights stops. The tensor is cloned instead, with its parameters.
"""

import torch

from qpatch.finding import incompatible, needed, not_needed
from qpatch.patching import Supply


def deepcopy_of(self, memo):
    """``__deepcopy__`` of a QuantizedTensor, bare or as a Parameter: a clone that owns its numbers and scales."""
    copied = self.detach().clone()
    if isinstance(self, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
    return copied


def examine(module):
    cls = vars(module).get("QuantizedTensor")
    if not isinstance(cls, type) or not issubclass(cls, torch.Tensor):
        return incompatible("there is no tensor class QuantizedTensor")
    if any("__deepcopy__" in vars(parent) for parent in cls.__mro__[:cls.__mro__.index(torch.Tensor)]):
        return not_needed("QuantizedTensor copies itself")
    return needed("a quantized tensor has no storage that torch could copy")


def patches(module):
    return [Supply(module.QuantizedTensor, "__deepcopy__", deepcopy_of)]
