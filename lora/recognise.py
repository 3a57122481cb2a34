"""Which family a file is made for: by its keys, checked against the model's family where that is known."""

from __future__ import annotations

from collections import Counter

from .errors import FileError, UnknownFamily
from .families import FAMILIES, Family, foreign
from .keys import Resolver, split_suffix

#: Keys shown in a message about a file that is not understood, and looked at to say what it is.
_SAMPLES, _LOOKED_AT = 3, 500


def recognise(name: str, keys: list[str], wanted: Family | None) -> Resolver | None:
    """The resolver of the family that the ``keys`` of file ``name`` are for, or None if all belong to text encoders.

    ``wanted`` is the model's family. Raises :class:`UnknownFamily` for a file of another one, and
    :class:`FileError` for one without tensors.
    """
    if not keys:
        raise FileError("the file holds no tensors", file=name)
    resolvers = {family.name: Resolver(family) for family in FAMILIES.values()}
    known, strange, texts = _count(resolvers.values(), keys)
    if texts == len(keys):
        return None
    best = max(FAMILIES.values(), key=lambda family: known[family.name])
    if wanted is not None and known[wanted.name]:
        best = wanted
    # FLUX names its attention layers as Qwen-Image does, and they have the same size.
    others = Counter(filter(None, map(foreign.recognise, strange[:_LOOKED_AT])))
    if others and not _marked(best, keys):
        raise _mismatch(name, others.most_common(1)[0][0], wanted)
    if not known[best.name]:
        raise UnknownFamily(_nothing_known(keys), file=name, found=", ".join(keys[:_SAMPLES]))
    if wanted not in (None, best):
        raise _mismatch(name, best.title, wanted)
    return resolvers[best.name]


def _count(resolvers, keys) -> tuple[Counter, list[str], int]:
    """How many keys each family knows, the module names that none knows, and the number of text encoders' keys."""
    known, strange, texts = Counter(), [], 0
    for key in keys:
        for resolver in resolvers:
            resolved = resolver(key)
            if resolved.unknown is None:
                break
        if resolved.skipped is not None:
            texts += 1
        elif resolved.unknown is None:
            known[resolver.family.name] += 1
        else:
            strange.append(resolved.stem or key)
    return known, strange, texts


def _marked(family: Family, keys) -> bool:
    return any(map(family.marks.search, keys))


def _mismatch(name, found: str, wanted: Family | None) -> UnknownFamily:
    if wanted is None:
        titles = " and ".join(family.title for family in FAMILIES.values())
        return UnknownFamily(f"this looks like a {found} LoRA; {titles} are supported", file=name)
    return UnknownFamily("the LoRA is made for another model", file=name, expected=wanted.title, found=found)


def _nothing_known(keys) -> str:
    if not any(split_suffix(key) and not key.endswith(".weight") or "lora" in key for key in keys):
        return "this is not a LoRA: no key ends like an adapter's (a whole model or text encoder?)"
    return f"none of its {len(keys)} keys names a layer of {' or '.join(family.title for family in FAMILIES.values())}"
