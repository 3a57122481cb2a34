"""Hook ``lazy-linear``, nunchaku.models.utils: ``fuse_linears`` on Linears that have no weight yet.

It makes one Linear out of several (q, k and v) as the source of a quantized layer, without
copying weights: it reads dtype, device and whether there is a bias. Fused lazy Linears are a
lazy Linear again, so nothing of the size of the weights is allocated and ``from_linear`` decides on
dtype and device as for any other lazy Linear.
"""

import inspect

import torch

from qpatch.finding import incompatible, not_needed
from qpatch.patching import Wrap

from .lazy_lend import declared_dtype, lazy, lend, twin
from .lazy_probe import SIZE, UnfilledLinear, verdict

NAME = "fuse_linears"


def examine(module):
    function = vars(module).get(NAME)
    if function is None:
        return not_needed(f"there is no {NAME} here that could read a Linear's parameters")
    try:
        inspect.signature(function).bind([])
    except (TypeError, ValueError) as error:
        return incompatible(f"{NAME} does not take a list of Linears: {error}")
    return verdict(NAME, lambda prepare: _fault(function, prepare))


def patches(module):
    return [Wrap(module, NAME, _mended)]


def _mended(original):
    def fuse_linears(linears, *args, **kwargs):
        source = next((linear for linear in linears if lazy(linear)), None)
        # A list of one is answered with that very Linear.
        if source is None or len(linears) == 1:
            return original(linears, *args, **kwargs)
        dtype = declared_dtype(source) or torch.get_default_dtype()
        fused = original([lend(linear, dtype, "meta") for linear in linears], *args, **kwargs)
        return _lazy_like(source, fused)

    return fuse_linears


def _lazy_like(source, fused):
    """A lazy Linear of the class of ``source`` with the features of ``fused``, and its bias as a declaration."""
    made = twin(source)
    made.in_features, made.out_features = fused.in_features, fused.out_features
    made.bias = None
    made.comfy_need_lazy_init_bias = fused.bias is not None
    return made


def _fault(fuse, prepare) -> str | None:
    for bias in (False, True):
        # Linears on the CPU draw from the global generator as they are made.
        with torch.random.fork_rng(devices=[]):
            fused = fuse([prepare(UnfilledLinear(bias)), prepare(UnfilledLinear(bias))])
        if fused.out_features != 2 * SIZE:
            return f"makes a Linear of {fused.out_features} outputs out of {SIZE} + {SIZE}"
        has_bias = fused.bias is not None or getattr(fused, "comfy_need_lazy_init_bias", False)
        if has_bias != bias:
            return "drops the biases that the Linears declare" if bias else "adds a bias that nobody declared"
    return None
