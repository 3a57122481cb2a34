"""A key of a LoRA file -> which layer it is about, and which part of the adapter it holds.

key = prefix + module name + suffix. Prefixes are tables here, suffixes in suffixes.py; module names are the
family's business (families/). None of them imports torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from . import families
from .families import Family
from .roles import Role
from .suffixes import split_suffix


@dataclass(frozen=True, slots=True)
class Target:
    """A source layer: a canonical module and the part of its rows ("q", "k", "v", "w1", "w3"; None: all)."""

    module: str
    part: str | None = None

    def __str__(self) -> str:
        return self.module if self.part is None else f"{self.module}[{self.part}]"


class Resolved(NamedTuple):
    """What a key means.

    ``target`` and ``role`` are set when it was understood; else ``skipped`` (left to the caller:
    a text encoder's key) or ``unknown`` says why not. ``stem`` is the module name as written,
    without prefix and suffix; ``infix`` the adapter name inside a PEFT key ("default"). A key whose end is an
    adapter's has stem and role even where no layer has its name.
    """

    key: str
    stem: str = ""
    target: Target | None = None
    role: Role | None = None
    infix: str | None = None
    skipped: str | None = None
    unknown: str | None = None


TEXT_ENCODER = "text encoder"

#: Tensors that describe the whole file instead of a module.
FLAGS = frozenset({"use_dora_flag", "use_rslora_flag", "lokr_factor"})

_TEXT_ENCODER = re.compile(r"(base_model\.model\.)?text_encoders?(_\d)?\.|lora_te\d*_")

#: Taken off again and again until none fits. The dots matter: "transformer." is not the start of "transformer_blocks".
DOTTED_PREFIXES = ("base_model.model.", "base_model.", "model.", "diffusion_model.", "transformer.", "pipe.", "dit.")
FLAT_PREFIXES = ("lora_unet__", "lora_unet_", "lycoris_", "lora_transformer_")

_FLAT, _DOTTED = ("|".join(map(re.escape, known)) for known in (FLAT_PREFIXES, DOTTED_PREFIXES))
_PREFIX = re.compile(f"(?:{_FLAT})|(?:{_DOTTED})*")


def strip_prefix(stem: str) -> str:
    """The module name without the prefixes that trainers and pipelines put in front."""
    return stem[_PREFIX.match(stem).end():]


def read(key: str) -> Resolved:
    """What a ``key`` says in whichever family: its module name as written and its role. ``unknown`` is "" for all
    but text encoders' keys."""
    if _TEXT_ENCODER.match(key):
        return Resolved(key, skipped=TEXT_ENCODER)
    split = split_suffix(key)
    if split is None:
        return Resolved(key, unknown="")
    written, role, infix = split
    return Resolved(key, strip_prefix(written), None, role, infix, None, "")


class Resolver:
    """Resolves the keys of one file in one family; each key and each module name is looked up once.

    ``keys_read`` may be shared with resolvers of other families: it holds what :func:`read` says.
    """

    def __init__(self, family: Family, keys_read: dict[str, Resolved] | None = None):
        self.family = family
        self._read = {} if keys_read is None else keys_read
        self._resolved: dict[str, Resolved] = {}
        self._targets: dict[str, Target | None] = {}

    def __call__(self, key: str) -> Resolved:
        """What ``key`` means; ``unknown`` is "" for one that does not resolve (nearest.py finds the reason)."""
        resolved = self._resolved.get(key)
        if resolved is None:
            resolved = self._resolved[key] = self._resolve(key)
        return resolved

    def _resolve(self, key):
        found = self._read.get(key)
        if found is None:
            found = self._read[key] = read(key)
        stem = found.stem
        if not stem:
            return found
        if stem not in self._targets:
            place = self.family.find(stem)
            self._targets[stem] = place and Target(*place)
        target = self._targets[stem]
        return found if target is None else Resolved(key, stem, target, found.role, found.infix)


def resolve(key: str, family: Family | str | None = None) -> Resolved:
    """What ``key`` means in ``family``, or in whichever family knows it.

    A key that maps nowhere has ``unknown`` set to the reason, with the nearest name that exists.
    """
    candidates = families.FAMILIES.values() if family is None else [families.get(family)]
    for candidate in candidates:
        resolved = Resolver(candidate)(key)
        if resolved.unknown is None:
            return resolved
    from .nearest import Nearest

    return resolved._replace(unknown=Nearest(candidates)(resolved))
