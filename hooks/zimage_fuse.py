"""Hook ``zimage-fuse``, ComfyUI-nunchaku's models.zimage: ``fuse_to_svdquant_linear`` on lazy Linears.

It makes one quantized layer out of w1 and w3 of a feed-forward and reads dtype and device of the
first one's weight. Its assertion that neither has a bias holds for any lazy Linear, also for one
that has declared a bias; with lent parameters it sees the bias and refuses, as it is meant to.
"""

import inspect

import torch

from qpatch.finding import incompatible
from qpatch.patching import Wrap

from .lazy_call import lending
from .lazy_probe import SIZE, UnfilledLinear, verdict, with_state

NAME = "fuse_to_svdquant_linear"


def examine(module):
    function = vars(module)[NAME]
    try:
        inspect.signature(function).bind(None, None, torch_dtype=None)
    except (TypeError, ValueError) as error:
        return incompatible(f"{NAME} does not take (linear1, linear2, torch_dtype=...): {error}")
    return with_state(verdict(NAME, lambda prepare: _fault(function, prepare)))


def patches(module):
    names = tuple(inspect.signature(vars(module)[NAME]).parameters)[:2]
    return [Wrap(module, NAME, lambda original: lending(original, names))]


def _fault(fuse, prepare) -> str | None:
    for asked in (torch.float16, None):
        first, second = UnfilledLinear(bias=False), UnfilledLinear(bias=False)
        layer = fuse(prepare(first), prepare(second), **({} if asked is None else {"torch_dtype": asked}))
        if layer.out_features != 2 * SIZE:
            return f"makes a layer of {layer.out_features} outputs out of {SIZE} + {SIZE}"
        wanted = asked or first.weight_comfy_model_dtype
        if layer.proj_down.dtype != wanted:
            return f"makes a layer of {layer.proj_down.dtype} where {wanted} is asked for or declared"
        if layer.proj_down.device.type != "cpu":
            return f"puts the layer on {layer.proj_down.device} before it is loaded"
    return None if _minds_a_bias(fuse, prepare) else "drops the biases that the Linears declare"


def _minds_a_bias(fuse, prepare) -> bool:
    """Whether Linears that declare a bias are refused, or fused with it."""
    try:
        layer = fuse(prepare(UnfilledLinear(bias=True)), prepare(UnfilledLinear(bias=True)), torch_dtype=torch.float16)
    except Exception:  # any refusal is one
        return True
    return getattr(layer, "bias", None) is not None
