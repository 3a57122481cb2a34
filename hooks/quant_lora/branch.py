"""The pair of a layer, run in front of the layer's own forward.

The branch is the module's ``forward``, not a forward hook: a graph that torch.compile made before the LoRA
came does not look for new hooks, but it does look at ``forward``. It stands outside whatever the class does
to its input (rotation, smoothing, quantization), so it sees the activation that the LoRA was trained on. Its
factors are no parameters and no buffers: they are in no state dict, and no memory manager counts, moves or
backs them up.
"""

from __future__ import annotations

import torch
from torch import nn

from .pair import Pair

_FORWARD = "forward"


class Branch:
    """``fixed``: the pair of the patcher's patches; ``scheduled``: that of the conditioning hooks in effect."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.before = vars(module).get(_FORWARD)
        self.fixed: Pair | None = None
        self.scheduled: Pair | None = None

    def __call__(self, input, *args, **kwargs):
        if self.before is None:
            output = type(self.module).forward(self.module, input, *args, **kwargs)
        else:
            output = self.before(input, *args, **kwargs)
        x = input if type(input) is torch.Tensor else _plain(input)
        for pair in (self.fixed, self.scheduled):
            if pair is not None:
                output = pair.added_to(output, x)
        return output

    @property
    def idle(self) -> bool:
        return self.fixed is None and self.scheduled is None


def _plain(input) -> torch.Tensor:
    """An activation that was quantized before it came here, as numbers."""
    return input.dequantize() if hasattr(input, "dequantize") and hasattr(input, "_qdata") else input


def of(module: nn.Module) -> Branch | None:
    """The branch of ``module``, also where something else has wrapped its forward since; None if it has none."""
    return vars(module).get("qpatch_branch")


def change(module: nn.Module, like: torch.Tensor) -> torch.Tensor | None:
    """What the fixed pair of ``module`` amounts to in its weight, [out, in] as ``like``; None without one."""
    branch = of(module)
    if branch is None or branch.fixed is None:
        return None
    return branch.fixed.up.to(like) @ branch.fixed.down.to(like)


def put(module: nn.Module, *, fixed: Pair | None = None, scheduled: Pair | None = None) -> None:
    """Give ``module`` a pair; the other one, if it has it, stays."""
    branch = of(module)
    if branch is None:
        branch = Branch(module)
        module.qpatch_branch = branch
        module.forward = branch
    branch.fixed = fixed or branch.fixed
    branch.scheduled = scheduled or branch.scheduled


def remove(module: nn.Module, *, fixed: bool = False, scheduled: bool = False) -> None:
    """Take pairs from ``module``; with the last one the branch goes, and the module's forward is its own again."""
    branch = of(module)
    if branch is None:
        return
    branch.fixed = None if fixed else branch.fixed
    branch.scheduled = None if scheduled else branch.scheduled
    # Somebody may have wrapped the forward since and be called first; idle, the branch adds nothing there.
    if not branch.idle or vars(module).get(_FORWARD) is not branch:
        return
    del module.qpatch_branch
    if branch.before is None:
        del module.forward
    else:
        module.forward = branch.before
