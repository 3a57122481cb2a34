"""Hook ``lazy-linear``, nunchaku.models.text_encoders.linear: ``W4Linear.from_linear`` on lazy Linears.

With ``init_only`` it makes an empty layer to be filled from a state dict and reads dtype, device
and whether there is a bias. Without it, it quantizes the values of the weight, and there are none:
that is refused with a clear error, where upstream stumbles over None.
"""

import inspect

import torch

from qpatch.finding import incompatible, not_needed
from qpatch.patching import Wrap

from .lazy_call import Call, lending
from .lazy_lend import describe, lazy
from .lazy_probe import SIZE, UnfilledLinear, verdict


def examine(module):
    function = vars(module.W4Linear).get("from_linear")
    if function is None:
        return not_needed("W4Linear has no from_linear that could read a Linear's parameters")
    if not isinstance(function, staticmethod):
        return incompatible("W4Linear.from_linear is not a staticmethod")
    try:
        inspect.signature(function.__func__).bind(None, group_size=SIZE, init_only=True)
    except (TypeError, ValueError) as error:
        return incompatible(f"W4Linear.from_linear does not take (linear, group_size=..., init_only=True): {error}")
    return verdict("W4Linear.from_linear", lambda prepare: _fault(function.__func__, prepare))


def patches(module):
    return [Wrap(module.W4Linear, "from_linear", _mended)]


def _mended(original):
    signature = inspect.signature(original)
    name = next(iter(signature.parameters))
    empty = lending(original, (name,))

    def from_linear(*args, **kwargs):
        call = Call(signature, args, kwargs)
        linear = call.asked(name)
        if lazy(linear) and not call.asked("init_only"):
            raise TypeError(
                f"{describe(linear)} has no weight yet that could be quantized; "
                "load the model first, or pass init_only=True for an empty layer"
            )
        return empty(*args, **kwargs)

    return from_linear


def _fault(from_linear, prepare) -> str | None:
    layer = from_linear(prepare(UnfilledLinear(bias=True)), group_size=SIZE, init_only=True)
    if getattr(layer, "bias", None) is None:
        return "drops the bias that the Linear declares"
    if layer.bias.dtype != torch.bfloat16:
        return f"makes a layer of {layer.bias.dtype} where torch.bfloat16 is declared"
    return None
