"""How the hooks for lazy Linears find out whether upstream copes by itself: by trying it, tiny."""

import sys

import torch

from qpatch.finding import Finding, incompatible, needed, not_needed

from .lazy_lend import lazy, lend

#: in_features and out_features of the Linears that are tried: whole groups of each quantized format.
SIZE = 128


class UnfilledLinear(torch.nn.Linear):
    """A Linear in the state that ComfyUI leaves it in under dynamic VRAM; needs no ComfyUI."""

    def __init__(self, bias: bool, dtype: torch.dtype | None = torch.bfloat16):
        torch.nn.Module.__init__(self)
        self.in_features = self.out_features = SIZE
        self.weight = None
        self.bias = None
        self.comfy_need_lazy_init_bias = bias
        self.weight_comfy_model_dtype = self.bias_comfy_model_dtype = dtype


def same(source):
    """``source`` as it is: what an unmended caller hands over."""
    return source


def verdict(name: str, fault) -> Finding:
    """Judge a function by ``fault(prepare)``: what is wrong when the Linears go through ``prepare``, or None.

    Tried with lazy Linears, and then with lent parameters: only where that helps is it needed.
    """
    wrong = _tried(fault, same)
    if wrong is None:
        return not_needed(f"{name} copes with a Linear that has no weight yet")
    still = _tried(fault, lend)
    if still is not None:
        return incompatible(f"{name} is not what this hook knows: even on a Linear with a weight it {still}")
    return needed(f"{name}, on a Linear that has no weight yet, {wrong}")


def _tried(fault, prepare) -> str | None:
    try:
        return fault(prepare)
    except Exception as error:  # whatever it is, it is the answer
        return f"raises {type(error).__name__}: {error}"


def active() -> bool | None:
    """Whether ComfyUI builds lazy Linears in this process; None while comfy.ops is not imported.

    Asked of a Linear, not of a setting: which one decides differs between releases and platforms.
    """
    ops = getattr(sys.modules.get("comfy.ops"), "disable_weight_init", None)
    linear = getattr(ops, "Linear", None)
    return None if linear is None else lazy(linear(1, 1, bias=False))


def with_state(found: Finding) -> Finding:
    """``found``, with a word on whether the fault can show here (users cannot tell which switch decides)."""
    words = {None: "unknown, comfy.ops is not imported", True: "yes", False: "no"}[active()]
    return Finding(found.verdict, f"{found.reason}; lazy Linear active: {words}")
