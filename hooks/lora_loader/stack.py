"""The LoRAs of one patcher. A stack is an attachment of its patcher, and ComfyUI clones it by value.

ComfyUI's own extension points carry the rest: an injection brings the model to the stack when the
patcher is loaded and back when another one is, and a callback keeps a clone from believing that it
was injected itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from . import running
from .opened import Lora

KEY = "qpatch.lora"


@dataclass(frozen=True)
class Entry:
    """One LoRA and its strength."""

    lora: Lora
    strength: float


@dataclass
class Stack:
    """What a patcher wants composed.

    ``entries``    in the order of the nodes.
    ``scheduled``  LoRAs that come and go with conditioning hooks: ComfyUI's hook reference -> entry, whose
                   strength is multiplied by the hook's own at each step.
    ``told``       the entries that the log knows of: one line for each, however often they are composed.
    """

    entries: list[Entry] = field(default_factory=list)
    scheduled: dict[object, Entry] = field(default_factory=dict)
    told: list[Entry] | None = None

    def on_model_patcher_clone(self) -> Stack:
        """ComfyUI's protocol for attachments."""
        return Stack([Entry(entry.lora.copy(), entry.strength) for entry in self.entries], dict(self.scheduled))

    def wanted(self, patcher) -> list[tuple[Lora, float]]:
        """(LoRA, strength) for the model as ``patcher`` runs it now.

        A scheduled LoRA that is registered but not in effect has strength 0: it stays composed, so that
        switching it at the next step only rewrites its scale.
        """
        groups = getattr(patcher, "current_hooks", None)
        factors = {hook.hook_ref: hook.strength for hook in groups.hooks} if groups is not None else {}
        registered = getattr(patcher, "hook_patches", {})
        fixed = [(entry.lora, entry.strength) for entry in self.entries]
        return fixed + [(entry.lora, entry.strength * factors.get(reference, 0.0))
                        for reference, entry in self.scheduled.items() if reference in registered]


def of(patcher) -> Stack | None:
    """The stack of ``patcher``, or None if no LoRA was ever put on it."""
    return patcher.get_attachment(KEY)


def ensure(patcher) -> Stack:
    """The stack of ``patcher``, made and hooked into ComfyUI's life cycle if there is none."""
    stack = of(patcher)
    if stack is None:
        stack = Stack()
        patcher.set_attachments(KEY, stack)
        patcher.set_injections(KEY, running.injections())
        patcher.add_callback_with_key("on_clone", KEY, not_injected)
    return stack


def not_injected(_patcher, clone) -> None:
    """A clone copies ``is_injected``, but nothing was injected in its name.

    Left true, a clone that is thrown away would eject the LoRAs of the patcher that is running, and a
    node that changes a clone would inject its LoRAs while another patcher is loaded.
    """
    clone.is_injected = False
