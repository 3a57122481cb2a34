"""GLoRA: W + scale * (W a + b) with a and b of low rank: a change that depends on the base weight."""

from __future__ import annotations

import torch

from ..errors import ShapeError, UnsupportedAdapter
from ..keys import Role
from ..terms import Delta, Term
from .base import Adapter

_ROLES = (Role.glora_a1, Role.glora_a2, Role.glora_b1, Role.glora_b2)


class GLoRA(Adapter):
    """Two layouts, told apart by their shapes:

    present LyCORIS  a1 [in, r], a2 [r, in], b1 [out, r], b2 [r, in]: change W a1 a2 + b1 b2;
    old LyCORIS      a1 [r, in], a2 [in, r], b1 [r, in], b2 [out, r]: change W a2 a1 + b2 b1.
    """

    kind = "glora"
    marks = needs = frozenset(_ROLES)
    takes = frozenset({Role.dora, Role.glora_bm})

    def _measure(self):
        if Role.glora_bm in self.layer:
            raise self.layer.refuse(UnsupportedAdapter, "bm belongs to a convolution; these models have none", Role.glora_bm)
        shapes = [self.layer.matrix_shape(role) for role in _ROLES]
        fits = [order for order in (_PRESENT, _OLD) if _fits(*(shapes[index] for index in order))]
        if not fits:
            raise self.layer.refuse(ShapeError, "the factors do not fit each other", Role.glora_a1,
                                    expected="a1 [in, r], a2 [r, in], b1 [out, r], b2 [r, in]",
                                    found=", ".join(str(list(shape)) for shape in shapes))
        # Square layers fit both layouts, with rank and size exchanged; the rank is the smaller one.
        self._order = min(fits, key=lambda order: shapes[order[0]][1])
        inputs, rank = shapes[self._order[0]]
        self.rank = rank
        return shapes[self._order[2]][0], inputs

    def _change(self):
        a_in, a_out, b_out, b_in = (self.layer.matrix(_ROLES[index]).float() for index in self._order)
        scale = self.scale
        down = torch.cat([a_out, b_in])

        def rebase(weight, strength):
            return (Term(torch.cat([weight @ a_in, b_out], dim=1), down, scale * strength),)

        return Delta(rebase=rebase)


#: Positions in _ROLES of: [in, r] of a, [r, in] of a, [out, r] of b, [r, in] of b.
_PRESENT = (0, 1, 2, 3)
_OLD = (1, 0, 3, 2)


def _fits(a_in, a_out, b_out, b_in):
    inputs, rank = a_in
    return a_out == (rank, inputs) and b_in == (rank, inputs) and b_out[1] == rank
