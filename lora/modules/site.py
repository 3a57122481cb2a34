"""What all kinds of modules have in common: a place for parts of LoRAs, and the draft of a change."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..errors import PlanError
from ..keys import Target
from ..report import Applied
from ..terms import Delta
from .change import Change, original


@dataclass(slots=True)
class Part:
    """What one layer of one LoRA changes in one module.

    ``lora``    place of the LoRA in the stack.
    ``target``  the layer; ``file`` and ``key``: where it comes from.
    ``delta``   the change, of the rows and columns that this module holds.
    ``rows``    which rows of the module these are, in the order of the original layer.
    ``rank``, ``scale``: what the file says, for reports.
    """

    lora: int
    target: Target
    file: str
    key: str
    delta: Delta
    rows: slice
    rank: int | None = None
    scale: float = 1.0


def not_loaded(path: str) -> PlanError:
    """Why a layer without data (none, or on the meta device) cannot be changed."""
    return PlanError("the layer has no weight yet: ComfyUI fills it when the checkpoint is loaded; compose after that",
                     key=path)


class Draft(abc.ABC):
    """A change with everything decided but its size: modules that share buffers agree on a rank first."""

    #: Ranks that are to be appended to the module's low-rank branch; 0 where it has none.
    rank = 0
    lines: list[Applied]

    @abc.abstractmethod
    def build(self, rank: int | None = None) -> Change:
        """Make the new objects, the low-rank branch padded with zeros to ``rank`` appended ranks.

        Raises :class:`NonFiniteError` for values that the module's dtype cannot hold.
        """


class Site(abc.ABC):
    """A module that can hold LoRAs.

    ``path`` its name, ``owner`` the module, ``out`` and ``inp`` the extents of its weight ([out] alone for a norm,
    ``inp`` is None then).
    """

    #: The field's name for it, shown in plans.
    kind: ClassVar[str]

    def __init__(self, path: str, owner: nn.Module, out: int, inp: int | None):
        self.path, self.owner, self.out, self.inp = path, owner, out, inp

    def bare(self, name: str):
        """The attribute ``name`` as it is without any LoRA, where the module is now."""
        return original(self.owner, name)

    @property
    @abc.abstractmethod
    def has_bias(self) -> bool: ...

    @abc.abstractmethod
    def weight(self) -> torch.Tensor:
        """The weight without LoRA, rebuilt where it is quantized: [out, in] float32, rows as in the original layer.

        Raises :class:`UnsupportedAdapter` where that is not possible.
        """

    @abc.abstractmethod
    def bias(self) -> torch.Tensor:
        """The bias without LoRA, [out] float32, rows as in the original layer."""

    @abc.abstractmethod
    def draft(self, parts: Sequence[Part], strengths: Sequence[float], max_rank: int) -> Draft:
        """Decide how ``parts`` go into this module; raises :class:`UnsupportedAdapter` or :class:`PlanError`."""
