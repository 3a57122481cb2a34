"""Sort the keys of a file into layers, and settle what the file says twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from .adapters import Adapter
from .errors import FileError
from .families import Family
from .keys import Resolved, Resolver, Role, Target
from .nearest import Nearest
from .source import Source


class Grouping:
    """The keys of a file, sorted.

    ``layers`` is target -> role -> key; ``skipped``, ``unknown`` and ``texts`` (of text encoders) hold the rest,
    as in :class:`LoraFile`. ``strays`` is module name -> role -> key of those that are unknown by their name alone.
    """

    def __init__(self, source: Source, resolver: Resolver, keys: Iterable[str]):
        self.layers: dict[Target, dict[Role, Resolved]] = {}
        self.skipped: list[tuple[str, str]] = []
        self.unknown: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.strays: dict[str, dict[Role, str]] = {}
        self._source = source
        self._nearest = Nearest([resolver.family])
        for key in keys:
            self._sort(resolver(key))
        self._drop_plain_weights()

    def _sort(self, resolved: Resolved):
        if resolved.skipped is not None:
            self.texts.append(resolved.key)
            self.skipped.append((resolved.key, resolved.skipped))
        elif resolved.unknown is not None:
            self.unknown.append((resolved.key, self._nearest(resolved)))
            if resolved.role is not None:
                self.strays.setdefault(resolved.stem, {})[resolved.role] = resolved.key
        else:
            layer = self.layers.setdefault(resolved.target, {})
            if resolved.role in layer:
                self._check_same(layer[resolved.role].key, resolved.key)
            else:
                layer[resolved.role] = resolved

    def _check_same(self, first: str, second: str):
        """Two spellings of one tensor are fine if they agree; the second is left out."""
        source = self._source
        one, other = source.entries[first], source.entries[second]
        same = (one.dtype, one.shape) == (other.dtype, other.shape)
        if not same or not torch.equal(source.tensor(first), source.tensor(second)):
            raise FileError(f"names the same tensor as {first!r}, with other content: two adapters in one file",
                            file=source.name, key=second)
        self.skipped.append((second, f"the same as {first}"))

    def _drop_plain_weights(self):
        """``X.weight`` is IA3's only beside ``X.on_input``; anywhere else it is the model's own weight."""
        for target, layer in list(self.layers.items()):
            if Role.ia3_weight in layer and Role.ia3_on_input not in layer:
                self.skipped.append((layer.pop(Role.ia3_weight).key, "a weight of the model itself, not of a LoRA"))
                if not layer:
                    del self.layers[target]


def overlaps(family: Family, layers: Mapping[Target, Adapter]) -> dict[Target, str]:
    """Layers that change rows which others change as well, with the reason for leaving them out.

    Some files hold a fused layer and its parts, redundantly: one set is to be used. It is the parts,
    as in diffusers, unless one of them is missing.
    """
    changing = {target for target, adapter in layers.items() if adapter.kind != "bias"}
    dropped = {}
    for fused in [target for target in changing if target.part is None]:
        parts = [part for part, _ in family.module(fused.module).parts]
        split = [Target(fused.module, part) for part in parts]
        present = [target for target in split if target in changing]
        if not present:
            continue
        if len(present) == len(split):
            dropped[fused] = f"its parts {', '.join(parts)} are in the file as well and are used"
        else:
            reason = f"all of {fused.module} is in the file as well and is used"
            dropped.update((target, reason) for target in present)
    return dropped
