"""Models whose blocks are offloaded to the CPU by nunchaku's CPUOffloadManager.

The manager keeps two buffer blocks, deep copies of block 0, and copies parameters and buffers of the other blocks
into them one by one. So every block, and the buffers, must have the same shapes: what one block's LoRA needs in rank,
all get, padded with zeros. An attribute or a hook on a block does not reach the buffers by itself.
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


def align(root: nn.Module, drafts: dict[str, Draft], strengths: Sequence[float], max_rank: int) -> dict[str, int]:
    """One rank for the low-rank branch of the same layer in all blocks of a manager: path -> ranks to append.

    To ``drafts``, by path, those of modules are added that need nothing but the padding.
    """
    ranks = {}
    for manager in managers(root):
        prefixes = _paths(root, manager.blocks)
        for inside, rank in _needed(prefixes, drafts).items():
            for prefix, block in zip(prefixes, manager.blocks):
                path = f"{prefix}.{inside}"
                if path not in drafts:
                    drafts[path] = recognise(path, block.get_submodule(inside)).draft([], strengths, max_rank)
                ranks[path] = rank
    return ranks


def followers(root: nn.Module, changes: Sequence[Change]) -> list[Change]:
    """For the buffer blocks that ``root`` has now: what ``changes`` of block 0 do to shapes, attributes and hooks.

    They belong to the buffers, which come and go with offloading, and not to a composition.
    """
    found = []
    for manager in managers(root):
        names = {id(module): inside for inside, module in manager.blocks[0].named_modules()}
        for change in changes:
            if id(change.owner) in names and _grows(change):
                inside = names[id(change.owner)]
                found += [_follow(buffer.get_submodule(inside), change) for buffer in manager.buffer_blocks]
    return found


def aligned(root: nn.Module, changes: Sequence[Change]) -> bool:
    """Whether ``changes`` give the same layer of all offloaded blocks the same shapes.

    If so, they were worked out for this offloading.
    """
    growing = {id(change.owner): [getattr(value, "shape", None) for value in change.values.values()]
               for change in changes if _grows(change)}
    for manager in managers(root):
        for inside, _ in manager.blocks[0].named_modules():
            shapes = [growing.get(id(block.get_submodule(inside))) for block in manager.blocks]
            if any(one != shapes[0] for one in shapes):
                return False
    return True


def _grows(change: Change) -> bool:
    """Whether a change alters shapes, or adds something to its module."""
    return any(getattr(value, "shape", None) != _bare_shape(change.owner, name)
               for name, value in change.values.items())


def _bare_shape(module: nn.Module, name: str):
    """Shape of what stands under ``name`` without any LoRA, or None."""
    standing = current(module, name)
    for change in module.__dict__.get(MARK, ()):
        standing = change.originals.get(name, standing)
    return getattr(standing, "shape", None)


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
        elif _bare_shape(module, name) != value.shape:
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
