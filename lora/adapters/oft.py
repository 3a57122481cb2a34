"""OFT and BOFT: the weight is rotated in blocks. No low rank: the change needs the base weight.

Two families that share nothing but the name:

LyCORIS and kohya  ``oft_blocks``, a rotation of the OUTPUT: W' = blockdiag(R)^T W.
PEFT, OneTrainer   ``oft_R.weight``, a rotation of the INPUT: W' = W blockdiag(R)^T.

For the former ``alpha`` is no scale but a bound on the norm of Q, and loaders disagree:

    "comfyui"  bound alpha; OFT's ``rescale`` is not used; the strength counts twice (S^2 for OFT).
    "trainer"  bound alpha * out; ``rescale`` multiplies the rows; the strength counts once.
"""

from __future__ import annotations

import math

import torch

from ..errors import ShapeError
from ..keys import Role
from ..terms import Delta
from .base import Adapter


class _OutputRotation(Adapter):
    """``oft_blocks`` as Q with R = (I + Q)(I - Q)^-1, the Cayley transform of a skew-symmetric Q."""

    marks = needs = frozenset({Role.oft_blocks})
    takes = frozenset({Role.rescale})

    def _scale_and_note(self):
        bound = f"norm of Q at most {self._bound():g}" if self._bound() else "no bound on Q"
        return 1.0, f"{bound}, convention of {self.layer.rules.convention}"

    @property
    def _out(self) -> int:
        """Rows of the layer: each subclass reads them off the shape that its blocks have."""
        raise NotImplementedError

    def _bound(self) -> float:
        alpha = self.layer.finite_number(Role.alpha) if Role.alpha in self.layer else 0.0
        return alpha * self._out if self.layer.rules.convention == "trainer" else alpha

    def _check_rescale(self):
        shape = self.layer.raw_shape(Role.rescale) if Role.rescale in self.layer else ()
        if Role.rescale in self.layer and math.prod(shape) != self._out:
            raise self.layer.refuse(ShapeError, "rescale does not fit the layer", Role.rescale,
                                    expected=f"[{self._out}, 1]", found=list(shape))

    def _rescale(self):
        return self.layer.tensor(Role.rescale).float().reshape(-1, 1) if Role.rescale in self.layer else None

    def _rotations(self) -> torch.Tensor:
        """R of every block, [..., b, b]; the norm of Q is taken over all blocks together, as trainers do."""
        blocks = self.layer.tensor(Role.oft_blocks).float()
        q = blocks - blocks.transpose(-1, -2)
        bound, length = self._bound(), torch.linalg.vector_norm(q).item() + 1e-8
        if 0 < bound < length:
            q = q * (bound / length)
        one = torch.eye(q.shape[-1])
        # (I + Q)(I - Q)^-1, the two factors commute.
        return torch.linalg.solve(one - q, one + q)


class OFT(_OutputRotation):
    """``oft_blocks`` [n, b, b], n b = out."""

    kind = "oft"

    @property
    def _out(self):
        return math.prod(self.layer.raw_shape(Role.oft_blocks)[:2])

    def _measure(self):
        shape = self.layer.raw_shape(Role.oft_blocks)
        if len(shape) != 3 or shape[1] != shape[2] or 0 in shape:
            raise self.layer.refuse(ShapeError, "the blocks are not square", Role.oft_blocks,
                                    expected="[blocks, b, b]", found=list(shape))
        self._check_rescale()
        return None

    def _change(self):
        rotations, trainer = self._rotations(), self.layer.rules.convention == "trainer"
        rescale = self._rescale() if trainer else None

        def rebase(weight, strength):
            blocks = weight.unflatten(0, rotations.shape[:2])
            turned = (rotations.transpose(1, 2).to(weight) @ blocks).flatten(0, 1)
            if rescale is not None:
                turned *= rescale.to(weight)
            return (turned - weight) * (strength if trainer else strength * strength)

        return Delta(rebase=rebase)

    def misfit(self, out, inp):
        return None if out == self._out else f"its blocks rotate {self._out} rows, the layer has {out}"


class BOFT(_OutputRotation):
    """``oft_blocks`` [m, n, b, b], n b = out: m rotations in a row, each on rows mixed as in a butterfly."""

    kind = "boft"

    @property
    def _out(self):
        return math.prod(self.layer.raw_shape(Role.oft_blocks)[1:3])

    def _measure(self):
        shape = self.layer.raw_shape(Role.oft_blocks)
        stages, _, size, _ = shape
        if shape[2] != shape[3] or 0 in shape or size % 2 or self._out % (2**(stages - 1) * size):
            raise self.layer.refuse(ShapeError, "the blocks do not form a butterfly", Role.oft_blocks,
                                    expected="[m, blocks, b, b], b even, blocks a multiple of 2^(m - 1)",
                                    found=list(shape))
        self._check_rescale()
        return None

    def _change(self):
        rotations, rescale = self._rotations(), self._rescale()
        trainer = self.layer.rules.convention == "trainer"

        def rebase(weight, strength):
            turned = weight
            for stage, rotation in enumerate(rotations * strength + torch.eye(rotations.shape[-1]) * (1 - strength)):
                turned = _butterfly(turned, rotation.to(weight), stage)
            if rescale is not None:
                turned = turned * (1 + strength * (rescale - 1) if trainer else rescale).to(weight)
            return (turned - weight) * (1.0 if trainer else strength)

        return Delta(rebase=rebase)

    def misfit(self, out, inp):
        return None if out == self._out else f"its blocks rotate {self._out} rows, the layer has {out}"


def _butterfly(weight, rotation, stage):
    """One stage: rows that are 2^stage * b / 2 apart are brought together, rotated in blocks, and put back."""
    stride = 2**stage * rotation.shape[-1] // 2
    mixed = weight.unflatten(0, (-1, 2, stride)).transpose(1, 2).flatten(0, 2).unflatten(0, rotation.shape[:2])
    turned = (rotation @ mixed).flatten(0, 1)
    return turned.unflatten(0, (-1, stride, 2)).transpose(1, 2).flatten(0, 2)


class InputRotation(Adapter):
    """PEFT's ``oft_R.weight`` [blocks, b (b - 1) / 2]: the upper triangles of skew-symmetric Q, blocks b = in.

    One row may serve all blocks. R is PEFT's default, the truncated series I + 2Q + 2Q^2 + 2Q^3 + Q^4.
    A buffer ``oft_R.scaled_oft`` marks OneTrainer's files whose weights are scaled by 2 sqrt(b - 1).
    """

    kind = "oft"
    marks = needs = frozenset({Role.oft_r})
    takes = frozenset({Role.oft_scaled})

    def _measure(self):
        rows, count = self.layer.matrix_shape(Role.oft_r)
        size = (1 + math.isqrt(1 + 8 * count)) // 2
        if size * (size - 1) // 2 != count:
            raise self.layer.refuse(ShapeError, "the columns are no triangle", Role.oft_r,
                                    expected="b (b - 1) / 2 columns", found=count)
        self._rows, self._size = rows, size
        return None

    def _scale_and_note(self):
        return 1.0, "rotation of the input"

    def _rotations(self):
        size = self._size
        packed = self.layer.matrix(Role.oft_r).float()
        if Role.oft_scaled in self.layer:
            packed = packed / (2 * math.sqrt(size - 1))
        upper = torch.zeros(self._rows, size, size)
        first, second = torch.triu_indices(size, size, offset=1)
        upper[:, first, second] = packed
        q = upper - upper.transpose(1, 2)
        square = q @ q
        return torch.eye(size) + 2 * q + 2 * square + 2 * square @ q + square @ square

    def _change(self):
        rotations = self._rotations()

        def rebase(weight, strength):
            columns = weight.unflatten(1, (-1, self._size)).transpose(0, 1)
            turned = (columns @ rotations.transpose(1, 2).to(weight)).transpose(0, 1).flatten(1)
            return (turned - weight) * strength

        return Delta(rebase=rebase)

    def misfit(self, out, inp):
        if inp == self._rows * self._size or (self._rows == 1 and inp % self._size == 0):
            return None
        return f"its blocks rotate {self._rows * self._size} columns, the layer has {inp}"
