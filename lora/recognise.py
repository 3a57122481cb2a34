"""Which family a file is made for: by its keys, checked against the model's family where that is known."""

from __future__ import annotations

from collections import Counter

from .errors import FileError, UnknownFamily
from .families import FAMILIES, Family, foreign
from .keys import Resolved, Resolver, split_suffix

#: Keys shown in a message about a file that is not understood, and looked at to say what it is.
_SAMPLES, _LOOKED_AT = 3, 500


def recognise(name: str, keys: list[str], wanted: Family | None) -> Resolver | None:
    """The resolver of the family that the ``keys`` of file ``name`` are for, or None if all belong to text encoders.

    ``wanted`` is the model's family. Raises :class:`UnknownFamily` for a file of another one, and
    :class:`FileError` for one without tensors.
    """
    if not keys:
        raise FileError("the file holds no tensors", file=name)
    best = _best_match(keys, [wanted] if wanted else FAMILIES.values(), {})
    if best.texts == len(keys):
        return None
    # FLUX names its attention layers as Qwen-Image does, and they have the same size.
    others = Counter(filter(None, map(foreign.recognise, best.strange[:_LOOKED_AT])))
    if others and not (best.known and best.marked(keys)):
        raise _mismatch(name, others.most_common(1)[0][0], wanted)
    if not best.known:
        raise _nothing_known(name, keys, wanted)
    return best.resolver


def _best_match(keys, candidates, keys_read) -> _Match:
    best = None
    for family in candidates:
        match = _Match(family, keys, keys_read)
        if not match.strange:
            return match
        if best is None or match.known > best.known:
            best = match
    return best


class _Match:
    """How well ``keys`` fit a family: ``known`` keys, ``texts`` of text encoders, ``strange`` module names."""

    def __init__(self, family: Family, keys: list[str], keys_read: dict[str, Resolved]):
        self.resolver = Resolver(family, keys_read)
        self.known = self.texts = 0
        self.strange: list[str] = []
        for resolved in map(self.resolver, keys):
            if resolved.skipped is not None:
                self.texts += 1
            elif resolved.unknown is None:
                self.known += 1
            else:
                self.strange.append(resolved.stem or resolved.key)

    def marked(self, keys) -> bool:
        """Whether any key names what only this family has."""
        return any(map(self.resolver.family.marks.search, keys))


def _mismatch(name, found: str, wanted: Family | None) -> UnknownFamily:
    if wanted is None:
        titles = " and ".join(family.title for family in FAMILIES.values())
        return UnknownFamily(f"this looks like a {found} LoRA; {titles} are supported", file=name)
    return UnknownFamily("the LoRA is made for another model", file=name, expected=wanted.title, found=found)


def _nothing_known(name, keys, wanted: Family | None) -> UnknownFamily:
    for family in FAMILIES.values():
        if family is not wanted and _Match(family, keys[:_LOOKED_AT], {}).known:
            return _mismatch(name, family.title, wanted)
    titles = " or ".join(family.title for family in ([wanted] if wanted else FAMILIES.values()))
    problem = f"none of its {len(keys)} keys names a layer of {titles}"
    if not any("lora" in key or (split_suffix(key) and not key.endswith(".weight")) for key in keys):
        problem = "this is not a LoRA: no key ends like an adapter's (a whole model or text encoder?)"
    return UnknownFamily(problem, file=name, found=", ".join(keys[:_SAMPLES]))
