"""Models whose blocks are offloaded to the CPU by nunchaku's CPUOffloadManager.

The manager keeps two buffer blocks, deep copies of block 0, and copies parameters and buffers of the other blocks
into them one by one. So every block, and the buffers, must have the same shapes: what one block's LoRA needs in rank, all
get, padded with zeros. An attribute or a hook on a block does not reach the buffers by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from . import recognise
from .change import MARK, Change, current
from .site import Draft


def managers(root: nn.Module) -> list:
    """The offload managers of ``root``: objects with lists ``blocks`` and ``buffer_blocks``."""
    return [value for value in root.__dict__.values() if hasattr(value, "buffer_blocks") and hasattr(value, "blocks")]


class Alignment:
    """One rank for the low-rank branches of the same layer in all blocks of a manager.

    ``drafts``: path of the module -> draft of its change; drafts for modules that only need padding are added.
    ``ranks``: path -> appended ranks, for the modules concerned.
    """

    def __init__(self, root: nn.Module, drafts: dict[str, Draft], strengths: Sequence[float], max_rank: int):
        self.ranks: dict[str, int] = {}
        self._positions: list[tuple[object, dict[str, str]]] = []
        for manager in managers(root):
            prefixes = _paths(root, manager.blocks)
            needed = _needed(prefixes, drafts)
            for inside, rank in needed.items():
                for prefix, block in zip(prefixes, manager.blocks):
                    path = f"{prefix}.{inside}"
                    if path not in drafts:
                        drafts[path] = recognise(path, block.get_submodule(inside)).draft([], strengths, max_rank)
                    self.ranks[path] = rank
            self._positions.append((manager, {inside: f"{prefixes[0]}.{inside}" for inside in needed}))

    def follow(self, changes: dict[str, Change]) -> Iterator[Change]:
        """For the buffer blocks, what the changes of block 0 do to shapes, attributes and hooks."""
        for manager, positions in self._positions:
            for buffer in manager.buffer_blocks:
                for inside, path in positions.items():
                    yield _follow(buffer.get_submodule(inside), changes[path])


def _paths(root: nn.Module, blocks: Sequence[nn.Module]) -> list[str]:
    names = {id(module): path for path, module in root.named_modules()}
    return [names[id(block)] for block in blocks]


def _needed(prefixes: list[str], drafts: dict[str, Draft]) -> dict[str, int]:
    """Name inside a block -> the most that any block's draft appends there."""
    needed: dict[str, int] = {}
    for path, draft in drafts.items():
        for prefix in prefixes:
            if draft.rank and path.startswith(prefix + "."):
                inside = path[len(prefix) + 1:]
                needed[inside] = max(needed.get(inside, 0), draft.rank)
    return needed


def _follow(module: nn.Module, change: Change) -> Change:
    device = next(module.parameters()).device
    values: dict[str, object] = {}
    for name, value in change.values.items():
        if not isinstance(value, torch.Tensor):
            values[name] = value
        elif getattr(current(module, name), "shape", None) != value.shape:
            # The contents do not matter: the manager copies a block in before each use.
            empty = torch.zeros(value.shape, dtype=value.dtype, device=device)
            values[name] = nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty
    return Change(module, f"offload buffer of {change.path}", values, change.hook)


def changes_in_buffers(root: nn.Module) -> Iterator[Change]:
    """All changes on buffer blocks, also those that came with the deep copy when offloading was switched on later."""
    for manager in managers(root):
        for buffer in manager.buffer_blocks:
            for module in buffer.modules():
                yield from module.__dict__.get(MARK, ())
