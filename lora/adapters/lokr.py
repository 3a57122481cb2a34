"""LoKr: W + scale * kron(W1, W2), each factor whole or as a product of two."""

from __future__ import annotations

from ..errors import FileError, IncompleteAdapter
from ..keys import Role
from ..structured import Kronecker
from .base import Adapter, factored

_WHOLE = {1: Role.lokr_w1, 2: Role.lokr_w2}
_PAIR = {1: (Role.lokr_w1_a, Role.lokr_w1_b), 2: (Role.lokr_w2_a, Role.lokr_w2_b)}


class LoKr(Adapter):
    """W1 [a, b], W2 [c, d], out = a c, in = b d; a, b, c, d are taken from the tensors, never from a setting.

    ``rank`` is that of the decomposed factor (W2's where both are), or None where both are whole.
    """

    kind = "lokr"
    marks = frozenset({*_WHOLE.values(), *_PAIR[1], *_PAIR[2]})
    takes = frozenset({Role.dora})

    def _measure(self):
        (a, b, rank1), (c, d, rank2) = self._factor_shape(1), self._factor_shape(2)
        self.rank = rank2 if rank2 is not None else rank1
        return a * c, b * d

    def _factor_shape(self, which):
        """(rows, columns, rank or None) of W1 or W2."""
        whole, (first, second) = _WHOLE[which], _PAIR[which]
        pair = [role for role in (first, second) if role in self.layer]
        if whole in self.layer:
            if pair:
                raise self.layer.refuse(FileError, f"the layer has both {whole} and {pair[0]}", whole)
            return *self.layer.matrix_shape(whole), None
        if len(pair) < 2:
            missing = second if first in self.layer else first if pair else whole
            raise self.layer.refuse(IncompleteAdapter, f"{missing} is missing")
        left, right = self.layer.matrix_shape(first), self.layer.matrix_shape(second)
        self._same_rank(first, left[1], second, right[0])
        return left[0], right[1], left[1]

    def _factor(self, which):
        if _WHOLE[which] in self.layer:
            return self.layer.matrix(_WHOLE[which])
        return tuple(self.layer.matrix(role) for role in _PAIR[which])

    def _change(self):
        return factored(Kronecker(self._factor(1), self._factor(2), self.scale))

    def _scale_and_note(self):
        """Both factors whole: there is no rank to divide by, and trainers write any alpha, 9999999999 among them."""
        if self.rank is not None or Role.scale in self.layer:
            return super()._scale_and_note()
        rules, stem = self.layer.rules, self.layer.stem
        rank = rules.config and rules.config.rank_of(stem)
        if rank:
            # PEFT divides by its configured rank even where both factors are whole.
            return rules.scale(rank, None, stem)
        return 1.0, "both factors whole: scale 1, alpha has no meaning"
