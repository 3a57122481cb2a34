"""IA3: rows or columns of the weight multiplied by learned numbers. The change needs the base weight."""

from __future__ import annotations

import math

import torch

from ..errors import ShapeError
from ..keys import Role
from ..terms import Delta
from .base import Adapter


class IA3(Adapter):
    """LyCORIS: ``weight`` w with ``on_input``: W' = W (1 + S w), along columns if on_input is true, else rows."""

    kind = "ia3"
    marks = needs = frozenset({Role.ia3_weight, Role.ia3_on_input})

    def _measure(self):
        shape = self.layer.raw_shape(Role.ia3_weight)
        self._extent = math.prod(shape)
        if not shape or self._extent != max(shape) or not self._extent:
            raise self.layer.refuse(ShapeError, "weight is not a vector", Role.ia3_weight, found=list(shape))
        return None

    def _scale_and_note(self):
        return 1.0, "multiplies " + ("columns" if self._on_input() else "rows")

    def _on_input(self):
        return bool(self.layer.number(Role.ia3_on_input))

    def _change(self):
        factors = self.layer.tensor(Role.ia3_weight).float().reshape((1, -1) if self._on_input() else (-1, 1))
        return Delta(rebase=lambda weight, strength: weight * (factors * strength).to(weight))

    def misfit(self, out, inp):
        extent = inp if self._on_input() else out
        return None if extent == self._extent else f"it has {self._extent} factors, the layer needs {extent}"


class PeftIA3(Adapter):
    """PEFT's ``ia3_l``: [out, 1] multiplies the layer's whole output, its bias too; [1, in] its input."""

    kind = "ia3"
    marks = needs = frozenset({Role.ia3_l})

    def _measure(self):
        rows, columns = self.layer.matrix_shape(Role.ia3_l)
        if min(rows, columns) != 1:
            raise self.layer.refuse(ShapeError, "ia3_l is not a vector", Role.ia3_l,
                                    expected="[out, 1] or [1, in]", found=[rows, columns])
        self._on_output = columns == 1
        self._extent = max(rows, columns)
        return None

    def _scale_and_note(self):
        return 1.0, "multiplies the " + ("output" if self._on_output else "input")

    def _change(self):
        excess = self.layer.matrix(Role.ia3_l).float() - 1

        def rebase(weight, strength):
            return weight * (excess * strength).to(weight)

        def rebias(bias: torch.Tensor, strength: float):
            return bias * (excess.flatten() * strength).to(bias)

        return Delta(rebase=rebase, rebias=rebias if self._on_output else None)

    def misfit(self, out, inp):
        extent = out if self._on_output else inp
        return None if extent == self._extent else f"it has {self._extent} factors, the layer needs {extent}"
