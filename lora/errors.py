"""Every refusal of this package: what was found, what was expected, in which file and at which key."""

from __future__ import annotations

from .printable import printable


class LoraError(Exception):
    """Base of all refusals.

    ``file``      name of the LoRA file (or the name given for a dict), or None.
    ``key``       the tensor's key in that file, or the module's name, or None.
    ``expected``  what would have been right, or None.
    ``found``     what is there, or None.
    """

    def __init__(self, problem: str, *, file=None, key=None, expected=None, found=None):
        self.problem = problem
        self.file, self.key, self.expected, self.found = file, key, expected, found
        super().__init__(self._message())

    def naming(self, file: str, key: str | None = None) -> LoraError:
        """This error, of something that knew its module only, with the file (and the key in it) that is at fault."""
        if key is not None and self.key is not None:
            self.problem += f", in {self.key}"
        self.file, self.key = file, key or self.key
        self.args = (self._message(),)
        return self

    def _message(self) -> str:
        where = ": ".join(printable(str(part)) for part in (self.file, self.key) if part is not None)
        text = f"{where}: {self.problem}" if where else self.problem
        if self.expected is not None and self.found is not None:
            text += f" (expected {self.expected}, found {self.found})"
        elif self.expected is not None:
            text += f" (expected {self.expected})"
        elif self.found is not None:
            text += f" (found {self.found})"
        return text


class FileError(LoraError):
    """The file cannot be read, is no safetensors file, or contradicts itself."""


class UnknownFamily(LoraError):
    """The file is a LoRA for another kind of model, or none of its keys is known."""


class ShapeError(LoraError):
    """Shapes that do not fit each other, or do not fit the module they are for."""


class NonFiniteError(LoraError):
    """NaN or Inf where a number is needed, or a number that the target's dtype cannot hold."""


class UnsupportedAdapter(LoraError):
    """A kind of adapter that cannot be applied here; the reason says why."""


class IncompleteAdapter(LoraError):
    """A layer of a file that lacks a part of its adapter, such as lora_down without lora_up."""


class PlanError(LoraError):
    """The request does not fit the model: unknown module, another file's model, a bad strength."""


class BusyError(LoraError):
    """Another thread is composing on the same model."""
