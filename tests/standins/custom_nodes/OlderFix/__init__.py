"""Stand-in for the older pack that replaces ``from_linear`` itself, whatever stands there.

Its contract: torch_dtype must be passed; a declared bias is dropped; the layer goes to ComfyUI's
device. Its search for the fuse helper lands on torch.ops, which has every attribute, and mends nothing.
"""

import sys

import comfy.model_management
from nunchaku.models.linear import SVDQW4A4Linear

NODE_CLASS_MAPPINGS = {}


def _from_linear(cls, linear, **kwargs):
    weight = linear.weight
    if weight is None and "torch_dtype" not in kwargs:
        raise TypeError("linear.weight is None; pass torch_dtype=")
    torch_dtype = kwargs.pop("torch_dtype") if "torch_dtype" in kwargs else weight.dtype
    device = comfy.model_management.get_torch_device() if weight is None else weight.device
    return cls(in_features=kwargs.pop("in_features", linear.in_features), out_features=linear.out_features,
               bias=linear.bias is not None, torch_dtype=torch_dtype, device=device, **kwargs)


SVDQW4A4Linear.from_linear = classmethod(_from_linear)
for _module in list(sys.modules.values()):
    if hasattr(_module, "fuse_to_svdquant_linear") and hasattr(_module, "add_comfy_cast_weights_attr"):
        _module.fuse_to_svdquant_linear = _from_linear
        break
