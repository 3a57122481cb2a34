"""All keys of a file that are about one layer: what an adapter is built from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .errors import FileError, NonFiniteError, ShapeError
from .keys import Role, Target
from .rules import Rules
from .source import Source
from .suffixes import INTERLEAVED

_FACTOR_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_FP8 = frozenset({"F8_E4M3", "F8_E5M2"})

#: Shift, scale and gate of the attention, then of the MLP: what a modulation layer's rows consist of.
CHUNKS = 6

#: Roles of single numbers, in any dtype; all others are factors and must be floating point.
_NUMBERS = frozenset({Role.alpha, Role.scale, Role.ia3_on_input, Role.reshape_weight, Role.oft_scaled})


@dataclass(frozen=True)
class Layer:
    """``keys``: role -> key in ``source``. ``stem``: the module's name as the file writes it."""

    target: Target
    keys: Mapping[Role, str]
    source: Source
    stem: str = ""
    rules: Rules = field(default_factory=Rules)
    _finite: set[Role] = field(default_factory=set, compare=False, repr=False)

    @property
    def file(self) -> str:
        return self.source.name

    def __contains__(self, role: Role) -> bool:
        return role in self.keys

    def refuse(self, kind: type, problem: str, role: Role | None = None, **facts):
        """An error of class ``kind`` about this layer, at the key of ``role`` (default: any of its keys)."""
        key = self.keys.get(role) or next(iter(self.keys.values()))
        return kind(problem, file=self.file, key=key, **facts)

    def check_dtypes(self):
        """Raise :class:`FileError` where a factor is not floating point."""
        for role, key in self.keys.items():
            dtype = self.source.entries[key].dtype
            if role not in _NUMBERS and dtype not in _FACTOR_DTYPES:
                raise FileError(f"{role} is not floating point", file=self.file, key=key,
                                expected=" or ".join(sorted(_FACTOR_DTYPES)), found=dtype)

    def raw_shape(self, role: Role) -> tuple[int, ...]:
        """The shape as the file says it."""
        return self.source.entries[self.keys[role]].shape

    def matrix_shape(self, role: Role) -> tuple[int, int]:
        """[rows, columns] of a factor; 1x1 convolutions count as matrices, anything else raises :class:`ShapeError`."""
        shape = self.raw_shape(role)
        if len(shape) < 2 or any(extent != 1 for extent in shape[2:]):
            raise self.refuse(ShapeError, f"{role} is not a matrix (convolutions larger than 1x1 do not exist here)",
                              role, expected="[rows, columns]", found=list(shape))
        if 0 in shape:
            raise self.refuse(ShapeError, f"{role} is empty (a rank of zero)", role, found=list(shape))
        return shape[:2]

    def number(self, role: Role) -> float:
        """The single number under ``role``, of any dtype and of shape [] or [1]; may be Inf or NaN."""
        shape = self.raw_shape(role)
        if any(extent != 1 for extent in shape):
            raise self.refuse(ShapeError, f"{role} is not a single number", role, expected="[]", found=list(shape))
        return self.source.number(self.keys[role])

    def finite_number(self, role: Role) -> float:
        """:meth:`number`, refusing Inf and NaN with :class:`NonFiniteError`."""
        value = self.number(role)
        if value - value != 0:
            raise self.refuse(NonFiniteError, f"{role} is not finite", role, found=value)
        return value

    def tensor(self, role: Role) -> torch.Tensor:
        """The tensor under ``role`` as it is, but fp8 as bfloat16 (exact); refuses Inf and NaN, looked for once."""
        tensor = self.source.tensor(self.keys[role])
        if self.source.entries[self.keys[role]].dtype in _FP8:
            tensor = tensor.to(torch.bfloat16)
        if role not in self._finite and not is_finite(tensor):
            raise self.refuse(NonFiniteError, f"{role} holds NaN or Inf: the training diverged, or the file is damaged",
                              role)
        self._finite.add(role)
        if self.keys[role].endswith(f".{INTERLEAVED}.weight"):
            return self._planar(role, tensor)
        return tensor

    def _planar(self, role, tensor):
        """Rows d * 6 + j in their original places, j * dim + d: the six parts of a modulation one after the other."""
        if tensor.shape[0] % CHUNKS:
            raise self.refuse(ShapeError, "the rows of a modulation are not six equal parts", role,
                              found=list(tensor.shape))
        return tensor.unflatten(0, (-1, CHUNKS)).transpose(0, 1).flatten(0, 1)

    def matrix(self, role: Role) -> torch.Tensor:
        """:meth:`tensor` as [rows, columns]."""
        tensor = self.tensor(role)
        return tensor if tensor.dim() == 2 else tensor.flatten(1)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite numbers.

    A sum takes half the time of the extremes and a tenth of ``isfinite``'s. It is NaN or Inf if any element is; where
    it overflows without one, the extremes decide.
    """
    # float32 takes the sum of any number of float16 values.
    if math.isfinite(tensor.sum(dtype=torch.float32 if tensor.dtype == torch.float16 else None).item()):
        return True
    low, high = torch.aminmax(tensor)
    return math.isfinite(low.item()) and math.isfinite(high.item())
