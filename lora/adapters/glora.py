"""GLoRA: W + scale * (W a + b) with a and b of low rank: a change that depends on the base weight."""

from __future__ import annotations

import torch

from ..errors import ShapeError
from ..keys import Role
from ..terms import Delta, Term
from .base import Adapter

_ROLES = (Role.glora_a1, Role.glora_a2, Role.glora_b1, Role.glora_b2)

#: Positions in _ROLES of: [in, r] of a, [r, in] of a, [out, r] of b, [r, in] of b.
_PRESENT = (0, 1, 2, 3)
_OLD = (1, 0, 3, 2)


class GLoRA(Adapter):
    """Two layouts, told apart by their shapes:

    present LyCORIS  a1 [in, r], a2 [r, in], b1 [out, r], b2 [r, in]: change W a1 a2 + b1 b2;
    old LyCORIS      a1 [r, in], a2 [in, r], b1 [r, in], b2 [out, r]: change W a2 a1 + b2 b1.

    The factors of a square layer fit both, with rank and size exchanged. Then the size of the base
    decides; where even that leaves both, the old layout is meant, as in ComfyUI.
    """

    kind = "glora"
    marks = needs = frozenset(_ROLES)
    takes = frozenset({Role.dora})

    def _measure(self):
        shapes = [self.layer.matrix_shape(role) for role in _ROLES]
        #: (out, in) -> (order, rank)
        self._layouts = {}
        for order in (_PRESENT, _OLD):
            (inputs, rank), a_out, (out, b_rank), b_in = (shapes[index] for index in order)
            if a_out == b_in == (rank, inputs) and b_rank == rank:
                self._layouts[out, inputs] = order, rank
        if not self._layouts:
            raise self.layer.refuse(ShapeError, "the factors do not fit each other", Role.glora_a1,
                                    expected="a1 [in, r], a2 [r, in], b1 [out, r], b2 [r, in]",
                                    found=", ".join(str(list(shape)) for shape in shapes))
        shape, (_, self.rank) = min(self._layouts.items(), key=lambda item: item[1][1])
        return shape

    def _change(self):
        factors = [self.layer.matrix(role) for role in _ROLES]
        alpha = self.layer.finite_number(Role.alpha) if Role.alpha in self.layer else None

        def rebase(weight, strength):
            order, rank = self._layouts[tuple(weight.shape)]
            a_in, a_out, b_out, b_in = (factors[index].to(weight) for index in order)
            scale, _ = self.layer.rules.scale(rank, alpha, self.layer.stem)
            up, down = torch.cat([weight @ a_in, b_out], dim=1), torch.cat([a_out, b_in])
            return (Term(up, down, scale * strength),)

        return Delta(rebase=rebase)

    def misfit(self, out, inp):
        return None if (out, inp) in self._layouts else super().misfit(out, inp)
