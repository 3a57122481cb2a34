"""Changes without factors: a difference of the weight, a new weight, a bias alone."""

from __future__ import annotations

from ..errors import ShapeError
from ..keys import Role
from ..terms import Delta
from .base import Adapter


class _Unscaled(Adapter):
    def _scale_and_note(self):
        return 1.0, ""

    def _plain_shape(self, role):
        shape = self.layer.raw_shape(role)
        if len(shape) == 1 and shape[0]:
            return shape
        return self.layer.matrix_shape(role)

    def _plain(self, role):
        tensor = self.layer.tensor(role)
        return tensor.flatten(1) if tensor.dim() > 2 else tensor


class Difference(_Unscaled):
    """``diff`` [out, in] is added to the weight; ``w_norm`` [dim] to a norm's."""

    kind = "diff"
    marks = frozenset({Role.diff, Role.w_norm})

    def _measure(self):
        if len(self.marks & self.keys.keys()) == 2:
            raise self.layer.refuse(ShapeError, "the layer has both diff and w_norm", Role.diff)
        return self._plain_shape(self._role)

    @property
    def _role(self):
        return Role.diff if Role.diff in self.layer else Role.w_norm

    def _change(self):
        return Delta(dense=self._plain(self._role))


class Replacement(_Unscaled):
    """``set_weight`` [out, in] or [dim] takes the place of the weight, blended with it by the strength.

    ComfyUI puts it in whole at any strength; at strength 1 the two agree.
    """

    kind = "set_weight"
    marks = needs = frozenset({Role.set_weight})

    def _measure(self):
        return self._plain_shape(Role.set_weight)

    def _scale_and_note(self):
        return 1.0, "blended with the base by the strength; ComfyUI puts it in whole"

    def _change(self):
        return Delta(replace=self._plain(Role.set_weight))


class Bias(_Unscaled):
    """``diff_b`` or ``b_norm`` [out] alone."""

    kind = "bias"
    marks = frozenset({Role.diff_b, Role.b_norm})

    def _measure(self):
        return None

    def _change(self):
        return Delta()

    def misfit(self, out, inp):
        rows = self.layer.raw_shape(next(iter(self.marks & self.keys.keys())))[0]
        return None if rows == out else f"its bias has {rows} rows, the layer has {out}"
