"""A prepared change of one module: put in place and taken back by setting attributes, nothing else.

The change is kept on the module itself, with the original objects, so that it follows the module
into a deepcopy, and whoever holds the module can tell what is in it and undo it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

#: Attribute of a changed module: the list of its changes.
MARK = "_qpatch_lora_changes"


class Rewrite(NamedTuple):
    """Other strengths, worked out: ``write`` puts them in place, ``undo`` the old ones. Neither needs memory."""

    write: Callable[[], None]
    undo: Callable[[], None]


class Live(Protocol):
    """The part of a change that depends on strengths, and can be written again for others."""

    def prepare(self, owner: nn.Module, before: Sequence[float], strengths: Sequence[float],
                changed: frozenset[int]) -> Rewrite | None:
        """Do all that can fail for ``strengths`` in place of ``before``; those of the LoRAs ``changed`` differ.

        None: nothing is to be written. Raises :class:`NonFiniteError` where a value does not fit the dtype.
        """


@dataclass(eq=False)
class Change:
    """New objects for attributes of ``owner``.

    ``path``       name of the module, for messages.
    ``values``     attribute -> new object: a Parameter, a buffer, a number.
    ``hook``       forward hook to be added, or None.
    ``live``       what :func:`qpatch.lora.set_strengths` rewrites.
    ``fixed``      LoRAs (places in the stack) whose part here cannot be rescaled.
    ``originals``  attribute -> object that stood there, while the change is in place.
    """

    owner: nn.Module
    path: str
    values: dict[str, object]
    hook: Callable | None = None
    live: list[Live] = field(default_factory=list)
    fixed: frozenset[int] = frozenset()
    originals: dict[str, object] = field(default_factory=dict)

    def install(self) -> None:
        """Put the new objects in place. May be called again after it, or :meth:`remove`, was interrupted."""
        if not self.marked():
            self.originals = {name: current(self.owner, name) for name in self.values}
            self.owner.__dict__.setdefault(MARK, []).append(self)
        for name, value in self.values.items():
            put(self.owner, name, value)
        if self.hook is not None:
            drop_hooks(self.owner, type(self.hook))
            self.owner.register_forward_hook(self.hook, with_kwargs=True)

    def remove(self) -> None:
        """Put the originals back. May be called again after it, or :meth:`install`, was interrupted."""
        if not self.marked():
            return
        if self.hook is not None:
            drop_hooks(self.owner, type(self.hook))
        for name, value in self.originals.items():
            put(self.owner, name, value)
        changes = self.owner.__dict__[MARK]
        changes.remove(self)
        if not changes:
            del self.owner.__dict__[MARK]

    def marked(self) -> bool:
        """Whether the module says that this change is in it."""
        return self in self.owner.__dict__.get(MARK, ())

    def stands(self) -> bool:
        """Whether the new objects are what the module holds (someone may have put others there)."""
        return all(current(self.owner, name) is value for name, value in self.values.items()
                   if isinstance(value, torch.Tensor))

    def bring(self) -> bool:
        """For a change that is not in place: move the new tensors to where the originals are now.

        False if something else stands where an original stood, or it was converted: the change is of no use then.
        """
        for name, value in self.values.items():
            before = self.originals[name]
            if current(self.owner, name) is not before:
                return False
            if isinstance(before, torch.Tensor):
                if before.dtype != value.dtype:
                    return False
                if before.device != value.device:
                    relocate(value, value.detach().to(before.device))
        return True

    def move_originals(self) -> Callable[[], None]:
        """Bring the originals to where the module is now; the copies are made here, the function returned sets them.

        A model that was moved or converted while it was composed takes its current parameters along, not the originals.
        """
        moved = []
        for name, original in self.originals.items():
            now = current(self.owner, name)
            if isinstance(original, torch.Tensor) and isinstance(now, torch.Tensor):
                if (original.device, original.dtype) != (now.device, now.dtype):
                    moved.append((original, original.detach().to(now.device, now.dtype)))

        return lambda: [relocate(original, data) for original, data in moved]


class Absent:
    """Stands for an attribute that was not there.

    The class itself does: it survives deepcopy and pickle as what it is.
    """


def relocate(tensor: torch.Tensor, moved: torch.Tensor) -> None:
    """Let the object ``tensor`` be what ``moved`` is, as nn.Module.to does with parameters."""
    if is_traceable_wrapper_subclass(tensor) or not torch._has_compatible_shallow_copy_type(tensor, moved):
        # Made of several tensors, or of another device type: it cannot take on the other's .data.
        moved = moved.detach()
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, moved)
    else:
        tensor.data = moved.detach()


def current(owner: nn.Module, name: str) -> object:
    """What ``owner`` holds under ``name``: parameter, buffer or attribute; Absent if nothing."""
    for table in (owner._parameters, owner._buffers):
        if name in table:
            return table[name]
    return owner.__dict__.get(name, Absent)


def put(owner: nn.Module, name: str, value: object) -> None:
    """Set an attribute without a way to fail half-way: one assignment in one of the module's tables."""
    if value is Absent:
        owner._buffers.pop(name, None)
        owner._non_persistent_buffers_set.discard(name)
        owner.__dict__.pop(name, None)
    elif name in owner._parameters:
        owner._parameters[name] = value
    elif isinstance(value, torch.Tensor):
        # Not in the state dict: what is saved is the model, not what is composed into it.
        owner._non_persistent_buffers_set.add(name)
        owner._buffers[name] = value
    else:
        owner.__dict__[name] = value


def original(owner: nn.Module, name: str):
    """What stands under ``name`` without any LoRA, at the place and in the dtype that the module has now."""
    now = current(owner, name)
    for change in owner.__dict__.get(MARK, ()):
        if name in change.originals:
            bare = change.originals[name]
            return bare.detach().to(now.device, now.dtype) if isinstance(bare, torch.Tensor) else bare
    return None if now is Absent else now


def parameter_like(owner: nn.Module, name: str, value: torch.Tensor) -> nn.Parameter:
    """``value`` as a Parameter to stand for ``owner``'s ``name``: pinned and trainable as that one is."""
    before = current(owner, name)
    if before.device.type == "cpu" and before.is_pinned():
        value = value.pin_memory()
    return nn.Parameter(value, requires_grad=before.requires_grad)


def drop_hooks(owner: nn.Module, kind: type) -> None:
    """Take off the forward hooks of class ``kind``.

    By class, because a deepcopy has other hook numbers than its handle.
    """
    for number in [number for number, hook in owner._forward_hooks.items() if isinstance(hook, kind)]:
        owner._forward_hooks.pop(number, None)
        owner._forward_hooks_with_kwargs.pop(number, None)
        owner._forward_hooks_always_called.pop(number, None)
