"""What all kinds of adapters have in common: a layer of a file, its size, its scale, its bias."""

from __future__ import annotations

import abc
import math
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import ClassVar

import torch

from ..errors import IncompleteAdapter, ShapeError
from ..keys import Role, Target
from ..layer import Layer
from ..structured import Structured
from ..terms import Delta
from .dora import decompose, magnitude_axis

#: Up to this rank the exact factors of a structured change are given as terms; beyond it the
#: change stays as it is, and whoever places it truncates it to the user's budget.
SMALL_RANK = 128

#: Elements of a layer, more than three times those of the largest one of any known model. Small factors can multiply
#: to a matrix that fits no memory.
LARGEST = 2**28

#: Twice the rank of any known file, and more. Matrices of rank x rank are made of factors that may be small.
HIGHEST_RANK = 2**13

_SHARED = frozenset({Role.alpha, Role.scale, Role.diff_b, Role.b_norm, Role.up_bias})


class Adapter(abc.ABC):
    """The change of one layer, as a file holds it. Building one reads shapes only; :meth:`delta` reads the data.

    ``kind``    the field's name for it: "lora", "lokr", "loha", ...
    ``shape``   (out, in) of the source layer, (out,) for a norm, or None where the file does not say it.
    ``rank``    rank of its factors, or None where it has none.
    ``target``, ``file``, ``keys`` (role -> key): what it is about and where it comes from.
    """

    kind: ClassVar[str]
    #: A layer with any of these roles is of this kind.
    marks: ClassVar[frozenset[Role]]
    #: It has to have all of these.
    needs: ClassVar[frozenset[Role]] = frozenset()
    #: And may have these besides alpha and biases.
    takes: ClassVar[frozenset[Role]] = frozenset()

    def __init__(self, layer: Layer):
        self.layer = layer
        self.rank: int | None = None
        self._check_roles()
        layer.check_dtypes()
        self.shape: tuple[int, ...] | None = self._measure()
        if self.shape is not None and math.prod(self.shape) > LARGEST:
            raise layer.refuse(ShapeError, "no layer is so large", found=list(self.shape))
        if self.rank is not None and self.rank > HIGHEST_RANK:
            raise layer.refuse(ShapeError, "no rank is so high", expected=f"at most {HIGHEST_RANK}", found=self.rank)
        self._check_tensors()
        self._check_bias()
        if Role.dora in layer:
            magnitude_axis(layer, self.shape)

    @property
    def target(self) -> Target:
        return self.layer.target

    @property
    def file(self) -> str:
        return self.layer.file

    @property
    def keys(self):
        return self.layer.keys

    @property
    def key(self) -> str:
        """One of its keys, for messages."""
        return next((key for role, key in self.keys.items() if role in self.marks), next(iter(self.keys.values())))

    @property
    def alpha(self) -> float | None:
        """The alpha tensor's value, or None."""
        return self.layer.number(Role.alpha) if Role.alpha in self.layer else None

    @property
    def scale(self) -> float:
        """The factor of the change that the file asks for (alpha/rank and the like), without the user's strength."""
        return self._scaling[0]

    @property
    def scale_note(self) -> str:
        """The rule behind :attr:`scale`, in words."""
        return self._scaling[1]

    @cached_property
    def _scaling(self) -> tuple[float, str]:
        return self._scale_and_note()

    @abc.abstractmethod
    def _measure(self) -> tuple[int, ...] | None:
        """Check the shapes against each other, set ``rank``, return :attr:`shape`; raises :class:`ShapeError`."""

    @abc.abstractmethod
    def _change(self) -> Delta:
        """The change of the weight (the bias is added by :meth:`delta`)."""

    def delta(self) -> Delta:
        """The change, for a weight of :attr:`shape`; reads and checks the data.

        Raises :class:`NonFiniteError` (naming file and key) for NaN or Inf.
        """
        delta, note = self._change(), self.scale_note
        if Role.dora in self.layer:
            delta = decompose(delta, self.layer, self.shape)
            note = f"{note}; {delta.note}"
        return replace(delta, bias=self._bias(), note=note)

    def says_the_same(self, other: Adapter) -> bool:
        """Whether the tensors of both are equal, role by role."""
        return self.keys.keys() == other.keys.keys() and all(
            torch.equal(self.layer.source.tensor(key), other.layer.source.tensor(other.keys[role]))
            for role, key in self.keys.items())

    def misfit(self, out: int, inp: int) -> str | None:
        """Why the layer does not fit a weight of ``out`` x ``inp``, or None if it does (or does not say)."""
        if self.shape in (None, (out, inp)):
            return None
        if self.shape == (inp, out):
            return "the layer is transposed"
        return "the layer has another size: the file was made for another model, or another variant of this one"

    def _check_roles(self):
        found = self._misfit_of_roles(tuple(self.keys))
        if found is not None:
            problem, role = found
            raise self.layer.refuse(IncompleteAdapter, problem, role)

    @classmethod
    @lru_cache(maxsize=256)
    def _misfit_of_roles(cls, roles: tuple[Role, ...]) -> tuple[str, Role] | None:
        """(problem, role at fault) of a layer with these roles. Layers of a file have few different sets of them."""
        missing = cls.needs - set(roles)
        if missing:
            have = next(role for role in roles if role in cls.marks)
            return f"{have} without {', '.join(sorted(missing))}", have
        strange = sorted(set(roles) - cls.needs - cls.marks - cls.takes - _SHARED)
        return (f"{strange[0]} has no meaning beside {cls.kind}", strange[0]) if strange else None

    def _same_rank(self, first: Role, one: int, second: Role, other: int):
        """Raise :class:`ShapeError` where the inner extents of two factors that are multiplied differ."""
        if one != other:
            raise self.layer.refuse(ShapeError, f"the ranks of {first} and {second} disagree", second,
                                    expected=one, found=other)

    def _scale_and_note(self) -> tuple[float, str]:
        """:attr:`scale` and :attr:`scale_note`; reads the alpha tensor."""
        if Role.scale in self.layer:
            value = self.layer.finite_number(Role.scale)
            return value, f"scale {value:g}"
        alpha = self.layer.finite_number(Role.alpha) if Role.alpha in self.layer else None
        return self.layer.rules.scale(self.rank, alpha, self.layer.stem)

    def _check_tensors(self):
        for role in self.keys:
            if math.prod(shape := self.layer.raw_shape(role)) > LARGEST:
                raise self.layer.refuse(ShapeError, "no layer is so large", role, found=list(shape))

    def _check_bias(self):
        for role in (Role.diff_b, Role.b_norm, Role.up_bias):
            if role not in self.layer:
                continue
            shape = self.layer.raw_shape(role)
            rows = self.shape[0] if self.shape else None
            if len(shape) != 1 or (rows is not None and shape[0] != rows):
                raise self.layer.refuse(ShapeError, "the bias does not fit the layer", role,
                                        expected=f"[{rows or 'out'}]", found=list(shape))

    def _bias(self) -> torch.Tensor | None:
        """The change of the bias. PEFT's lora_B.bias is scaled like the product it is added to; a bias diff is not."""
        parts = [self.layer.tensor(role).float() for role in (Role.diff_b, Role.b_norm) if role in self.layer]
        if Role.up_bias in self.layer:
            parts.append(self.layer.tensor(Role.up_bias).float() * self.scale)
        return sum(parts) if parts else None


def factored(change: Structured) -> Delta:
    """A structured change as exact terms where their rank is small, else as it is."""
    if change.exact_rank <= SMALL_RANK:
        return Delta(terms=change.terms())
    return Delta(dense=change)
