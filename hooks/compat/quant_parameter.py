"""Hook ``comfy-compat-quant-parameter``: a quantized weight is recognised also inside a Parameter.

Some builds of torch and comfy-kitchen give a Parameter that is no QuantizedTensor and holds one in
``.data``; ComfyUI's patchers then take it for a plain weight and add a LoRA to its packed numbers.
``get_key_weight``, where they all ask for a weight, then gives the quantized tensor itself.
"""

import torch

from . import Repair, Spot


def inside(weight, quantized: type):
    """The ``quantized`` tensor that ``weight`` is or holds; else ``weight`` as it is."""
    held = weight if weight is None or isinstance(weight, quantized) else getattr(weight, "data", None)
    return held if isinstance(held, quantized) else weight


def _hides(original, module):
    quantized = module.QuantizedTensor
    if not issubclass(quantized, torch.Tensor):
        return None
    small = quantized.from_float(torch.zeros(16, 16), "TensorCoreFP8Layout")
    wrapped = torch.nn.Parameter(small, requires_grad=False)
    return None if isinstance(wrapped, quantized) else "a Parameter hides the quantized tensor in it"


def _unwrap(original, module):
    def get_key_weight(model, key):
        weight, *functions = original(model, key)
        return (inside(weight, module.QuantizedTensor), *functions)
    return get_key_weight


REPAIR = Repair(Spot("get_key_weight", _hides, _unwrap), fine="a Parameter around a quantized tensor is one itself")
examine, patches = REPAIR.examine, REPAIR.patches
