"""LoRA: W + scale * up @ down."""

from __future__ import annotations

from ..errors import ShapeError
from ..keys import Role
from ..terms import Delta, Term
from .base import Adapter


class LoRA(Adapter):
    """``down`` [r, in], ``up`` [out, r], or 1x1 convolutions of these sizes."""

    kind = "lora"
    marks = frozenset({Role.down, Role.up})
    needs = marks
    takes = frozenset({Role.dora})

    def _measure(self):
        down, up = self.layer.matrix_shape(Role.down), self.layer.matrix_shape(Role.up)
        if down[0] != up[1]:
            raise self.layer.refuse(ShapeError, _disagreement(down, up), Role.down,
                                    expected="down [rank, in] and up [out, rank]",
                                    found=f"down {list(down)} and up {list(up)}")
        self.rank = down[0]
        return up[0], down[1]

    def _change(self):
        return Delta(terms=(Term(self.layer.matrix(Role.up), self.layer.matrix(Role.down), self.scale),))

    def misfit(self, out, inp):
        reason = super().misfit(out, inp)
        # Square layers: the swapped pair [out, r], [r, in] multiplies to [r, r] without complaint.
        if reason is not None and self.rank in (out, inp) and self.rank > max(self.shape):
            return "up and down look swapped or transposed"
        return reason


def _disagreement(down, up):
    if down[1] == up[0]:
        return "the factors are swapped or transposed"
    # Of a square layer both look alike: the rank is the smaller extent.
    if down[1] == up[1] and (down[0] != up[0] or down[1] < down[0]):
        return "down is transposed"
    if down[0] == up[0]:
        return "up is transposed"
    return "the ranks of down and up disagree"
