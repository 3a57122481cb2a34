"""Low-rank terms kept unscaled, and written with their scales into the up factor that the model uses.

The scale sits in ``up`` alone. What is kept is ``up`` of each term in the stored dtype and order,
only the rows it has; a change of strength is then one multiplication of each, and the same strength
gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from ..errors import NonFiniteError
from .change import Rewrite, current

#: Exponent of two to which float16 factors are brought, away from its overflow and its subnormals.
_FP16_EXPONENT = 14


@dataclass(slots=True)
class Scale:
    """Multiplier of some consecutive ranks: ``factor``, times the strength of LoRA number ``lora`` (None: of none)."""

    ranks: int
    factor: float
    lora: int | None

    def at(self, strengths: Sequence[float]) -> float:
        return self.factor * (1.0 if self.lora is None else strengths[self.lora])


@dataclass(eq=False)
class Block:
    """Unscaled values of a region of an up factor.

    ``values``   in the order in which the factor is stored.
    ``region``   index of the region in a view of the factor (see :class:`Blocks`).
    ``scales``   of its ranks, in order; ``ranks`` says which rank each of the last two axes' elements belongs to, for
                 a block that holds terms with different scales.
    ``source``   for messages.
    """

    values: torch.Tensor
    region: tuple[slice, ...]
    scales: tuple[Scale, ...]
    source: str
    ranks: torch.Tensor | None = None
    _largest: float | None = None

    @cached_property
    def loras(self) -> frozenset[int | None]:
        """The LoRAs whose strengths are in the scales."""
        return frozenset(scale.lora for scale in self.scales)

    def factor(self, strengths: Sequence[float], device: torch.device) -> float | torch.Tensor:
        """The multiplier: one number, or a float32 tensor on ``device`` that is broadcast over the values."""
        if self.ranks is None:
            return self.scales[0].at(strengths)
        factors = [scale.at(strengths) for scale in self.scales]
        if len(set(factors)) == 1:
            return factors[0]
        each = torch.tensor([factor for factor, scale in zip(factors, self.scales) for _ in range(scale.ranks)])
        padding = torch.zeros(int(self.ranks.max()) + 1 - len(each))
        return torch.cat((each, padding))[self.ranks].to(device)

    def check(self, strengths: Sequence[float], dtype: torch.dtype, path: str) -> None:
        """Raise :class:`NonFiniteError` where a scaled value would not fit ``dtype``."""
        factor = max([abs(scale.at(strengths)) for scale in self.scales])
        if factor <= 1 and dtype == self.values.dtype:
            return
        if self._largest is None:
            self._largest = largest(self.values)
        # The first: where all values are zero, a multiplier that float32 takes for Inf would make them NaN.
        if not factor <= torch.finfo(torch.float32).max or not self._largest * factor <= torch.finfo(dtype).max:
            raise NonFiniteError(f"at this strength {self.source} does not fit {_name(dtype)}", key=path,
                                 expected=f"at most {torch.finfo(dtype).max:.4g}",
                                 found=f"{self._largest * factor:.4g}")

    def write(self, view: torch.Tensor, factor: float | torch.Tensor) -> None:
        """Multiplied by ``factor`` of :meth:`factor`, into the region of ``view``."""
        target, values = view[self.region], self.values
        if values.device != target.device:
            values = values.to(target.device)
        if isinstance(factor, torch.Tensor):
            torch.mul(values, factor, out=target)
        elif factor == 1:
            target.copy_(values)
        else:
            torch.mul(values, factor, out=target)


@dataclass(eq=False)
class Blocks:
    """All blocks of one up factor, which stands as parameter or buffer ``name`` of its module.

    ``view`` turns the factor into what the blocks' regions refer to. ``tensor_of`` gets the tensor where it is not
    the attribute itself.
    """

    name: str
    path: str
    view: Callable[[torch.Tensor], torch.Tensor]
    blocks: list[Block] = field(default_factory=list)
    address: int = 0
    tensor_of: Callable[[nn.Module, str], torch.Tensor] = field(default=current)

    def fill(self, tensor: torch.Tensor, blocks: Iterable[Block], strengths: Sequence[float]) -> None:
        """Write ``blocks`` into a factor that is being made, each as soon as it is made: it is in the cache then."""
        view = self.view(tensor)
        for block in blocks:
            block.check(strengths, tensor.dtype, self.path)
            block.write(view, block.factor(strengths, tensor.device))
            self.blocks.append(block)
        self.address = tensor.data_ptr()

    def prepare(self, owner, before, strengths, changed):
        tensor = self.tensor_of(owner, self.name)
        concerned = [block for block in self.blocks if not changed.isdisjoint(block.loras)]
        if not concerned:
            return None
        for block in concerned:
            block.check(strengths, tensor.dtype, self.path)
        fresh = None
        if tensor.data_ptr() != self.address:
            # Moved since, or replaced by somebody: only memory that was allocated here is written to,
            # because anything else may be a read-only mapping of a file.
            fresh = tensor.detach().clone()

        def write(factors):
            target = tensor.detach()
            if fresh is not None:
                tensor.data = target = fresh
                self.address = fresh.data_ptr()
            view = self.view(target)
            for block, factor in zip(concerned, factors):
                block.write(view, factor)

        new, old = ([block.factor(one, tensor.device) for block in concerned] for one in (strengths, before))
        return Rewrite(lambda: write(new), lambda: write(old))


def largest(values: torch.Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)
    return max(-low.item(), high.item()) if low == low else math.nan


def normalized(up: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """(values, power of two) with ``up = values * power`` and the values well inside the range of ``dtype``.

    float16 loses small numbers and cannot hold large ones; a power of two costs no precision. bfloat16 has the
    range of float32 and needs none.
    """
    if dtype != torch.float16:
        return up, 1.0
    peak = largest(up)
    if not peak or not math.isfinite(peak):
        return up, 1.0
    shift = math.frexp(peak)[1] - _FP16_EXPONENT
    return up.float() * 2.0 ** -shift, 2.0 ** shift


def fits(values: torch.Tensor, dtype: torch.dtype, what: str, path: str, file: str, key: str) -> None:
    """Raise :class:`NonFiniteError` where finite ``values`` overflow in the 16-bit ``dtype``."""
    if values.dtype == dtype or torch.finfo(values.dtype).max <= torch.finfo(dtype).max:
        return
    peak = largest(values)
    if not peak <= torch.finfo(dtype).max:
        raise NonFiniteError(f"{what} does not fit {_name(dtype)}, the dtype of {path}", file=file, key=key,
                             expected=f"at most {torch.finfo(dtype).max:.4g}", found=f"{peak:.4g}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
