"""LoHa: W + scale * (w1_a w1_b) * (w2_a w2_b), the middle product elementwise."""

from __future__ import annotations

from ..errors import ShapeError
from ..keys import Role
from ..structured import Hadamard
from .base import Adapter, factored

_ROLES = (Role.hada_w1_a, Role.hada_w1_b, Role.hada_w2_a, Role.hada_w2_b)


class LoHa(Adapter):
    """w1_a [out, r1], w1_b [r1, in], w2_a [out, r2], w2_b [r2, in]; ``rank`` is r1, which alpha is divided by."""

    kind = "loha"
    marks = needs = frozenset(_ROLES)
    takes = frozenset({Role.dora})

    def _measure(self):
        a1, b1, a2, b2 = (self.layer.matrix_shape(role) for role in _ROLES)
        self._same_rank(_ROLES[0], a1[1], _ROLES[1], b1[0])
        self._same_rank(_ROLES[2], a2[1], _ROLES[3], b2[0])
        if (a1[0], b1[1]) != (a2[0], b2[1]):
            raise self.layer.refuse(ShapeError, "the two products have different sizes", Role.hada_w2_a,
                                    expected=[a1[0], b1[1]], found=[a2[0], b2[1]])
        self.rank = b1[0]
        return a1[0], b1[1]

    def _change(self):
        return factored(Hadamard(*(self.layer.matrix(role) for role in _ROLES), self.scale))
