"""The modules of a model as they are now: somebody may have exchanged one, or put a copy in its place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .change import MARK, Change


def strays(root: nn.Module, known: Sequence[Change]) -> list[Change]:
    """Changes that modules of ``root`` carry and that are none of ``known``: they came with a copy of a module."""
    ours = set(map(id, known))
    return [change for module in root.modules() for change in module.__dict__.get(MARK, ()) if id(change) not in ours]


def present(root: nn.Module, changes: Sequence[Change]) -> bool:
    """Whether the modules that ``changes`` are for are still modules of ``root``."""
    return {id(change.owner) for change in changes} <= set(map(id, root.modules()))
