"""The common currency of this package: a weight change as a sum of low-rank terms.

Whatever a file holds (LoRA, LoKr, LoHa, DoRA, OFT, a full difference), an adapter turns it into
a :class:`Delta` for the layer it was trained on; placement and modules know nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .structured import Structured


@dataclass(frozen=True)
class Term:
    """``scale * up @ down``, a part of a change of an [out, in] weight.

    ``up``: [out, r], ``down``: [r, in], any float dtype, on any device, often the very tensors of a
    caller's dict: never written to. ``scale`` holds alpha/rank and the like, not the user's strength.
    """

    up: torch.Tensor
    down: torch.Tensor
    scale: float = 1.0

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the weight it changes."""
        return self.up.shape[0], self.down.shape[1]


#: (base weight [out, in] float32, user strength) -> change of the weight, strength included: [out, in] float32,
#: or the terms of it where the change has a small exact rank. The base is not written to.
Rebase = Callable[["torch.Tensor", float], "torch.Tensor | tuple[Term, ...]"]

#: (base bias [out] float32, user strength) -> change of the bias [out] float32, strength included.
Rebias = Callable[["torch.Tensor", float], "torch.Tensor"]


@dataclass(frozen=True)
class Delta:
    """What an adapter changes in one layer; everything is to be multiplied by the user's strength.

    terms    the low-rank part, exact.
    dense    a part without a small exact rank, or None: a tensor [out, in] (for a norm: its own shape), or a
             :class:`~qpatch.lora.structured.Structured`. lowrank.truncate, .to_dense and .norm take either.
    bias     [out], added to the bias, or None.
    rebase   for adapters whose change depends on the weight (DoRA, GLoRA, OFT, IA3): called with that weight
             as the files before it have left it, it gives the change; then ``terms`` and ``dense`` are empty.
    rebias   the same for a change that depends on the base bias, or None.
    replace  the new value of the weight itself (``set_weight``), or None; blended as
             ``base + strength * (replace - base)``.
    note     a remark for the report, such as which alpha rule was used.
    """

    terms: tuple[Term, ...] = ()
    dense: torch.Tensor | Structured | None = None
    bias: torch.Tensor | None = None
    rebase: Rebase | None = None
    rebias: Rebias | None = None
    replace: torch.Tensor | None = None
    note: str = ""
