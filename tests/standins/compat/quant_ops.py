"""Stand-in for comfy.quant_ops: where comfy-kitchen's class is taken from."""

from comfy_kitchen.tensor import QuantizedTensor  # noqa: F401
