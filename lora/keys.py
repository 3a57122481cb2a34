"""A key of a LoRA file -> which layer it is about, and which part of the adapter it holds.

key = prefix + module name + suffix. Suffixes and prefixes are tables; module names are the
family's business (families/). Nothing here imports torch.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import NamedTuple

from . import families
from .families import Family


class Role(str, enum.Enum):
    """What one tensor is to its adapter. The values are the names used in messages."""

    down = "down"
    up = "up"
    mid = "mid"
    up_bias = "up_bias"
    alpha = "alpha"
    scale = "scale"
    dora = "dora"
    reshape_weight = "reshape_weight"
    lokr_w1 = "lokr_w1"
    lokr_w1_a = "lokr_w1_a"
    lokr_w1_b = "lokr_w1_b"
    lokr_w2 = "lokr_w2"
    lokr_w2_a = "lokr_w2_a"
    lokr_w2_b = "lokr_w2_b"
    lokr_t1 = "lokr_t1"
    lokr_t2 = "lokr_t2"
    hada_w1_a = "hada_w1_a"
    hada_w1_b = "hada_w1_b"
    hada_w2_a = "hada_w2_a"
    hada_w2_b = "hada_w2_b"
    hada_t1 = "hada_t1"
    hada_t2 = "hada_t2"
    glora_a1 = "glora_a1"
    glora_a2 = "glora_a2"
    glora_b1 = "glora_b1"
    glora_b2 = "glora_b2"
    glora_bm = "glora_bm"
    oft_blocks = "oft_blocks"
    oft_diag = "oft_diag"
    oft_r = "oft_r"
    oft_scaled = "oft_scaled"
    rescale = "rescale"
    tlora = "tlora"
    tlora_q = "tlora_q"
    tlora_p = "tlora_p"
    ia3_weight = "ia3_weight"
    ia3_on_input = "ia3_on_input"
    ia3_l = "ia3_l"
    diff = "diff"
    diff_b = "diff_b"
    set_weight = "set_weight"
    w_norm = "w_norm"
    b_norm = "b_norm"

    # Enum's own hash is a Python function; these are dict keys in every loop over a file.
    __hash__ = str.__hash__
    __str__ = str.__str__


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
    without prefix and suffix; ``infix`` the adapter name inside a PEFT key ("default").
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

#: An up factor whose rows stand in the order of Nunchaku's modulation layers (layer.py); a name of its own, so that
#: what does not know the order does not take it for a plain one.
INTERLEAVED = "lora_B_interleaved"

#: Last components of a key -> role. "*" stands for one component, the adapter's name in a PEFT key.
SUFFIXES: dict[tuple[str, ...], Role] = {
    ("lora_down", "weight"): Role.down,
    ("lora_up", "weight"): Role.up,
    ("lora_mid", "weight"): Role.mid,
    ("lora_A", "weight"): Role.down,
    ("lora_B", "weight"): Role.up,
    ("lora_A", "*", "weight"): Role.down,
    ("lora_B", "*", "weight"): Role.up,
    (INTERLEAVED, "weight"): Role.up,
    ("lora_A",): Role.down,
    ("lora_B",): Role.up,
    ("lora", "down", "weight"): Role.down,
    ("lora", "up", "weight"): Role.up,
    ("lora_linear_layer", "down", "weight"): Role.down,
    ("lora_linear_layer", "up", "weight"): Role.up,
    ("lora_B", "bias"): Role.up_bias,
    ("lora_B", "*", "bias"): Role.up_bias,
    ("alpha",): Role.alpha,
    ("lora_alpha",): Role.alpha,
    ("lora_alpha", "*"): Role.alpha,
    ("scale",): Role.scale,
    ("dora_scale",): Role.dora,
    ("magnitude",): Role.dora,
    ("dora_layer", "weight"): Role.dora,
    ("lora_magnitude_vector",): Role.dora,
    ("lora_magnitude_vector", "weight"): Role.dora,
    ("lora_magnitude_vector", "*"): Role.dora,
    ("lora_magnitude_vector", "*", "weight"): Role.dora,
    ("reshape_weight",): Role.reshape_weight,
    **{(f"lokr_{name}", *tail): Role(f"lokr_{name}")
       for name in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t1", "t2") for tail in ((), ("*",))},
    **{(f"hada_{name}", *tail): Role(f"hada_{name}")
       for name in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2") for tail in ((), ("*",))},
    **{(name, "weight"): Role(f"glora_{name}") for name in ("a1", "a2", "b1", "b2", "bm")},
    ("oft_blocks",): Role.oft_blocks,
    ("oft_diag",): Role.oft_diag,
    ("oft_R", "weight"): Role.oft_r,
    ("oft_R", "*", "weight"): Role.oft_r,
    ("oft_R", "scaled_oft"): Role.oft_scaled,
    ("rescale",): Role.rescale,
    ("lambda_layer",): Role.tlora,
    ("q_layer", "weight"): Role.tlora_q,
    ("p_layer", "weight"): Role.tlora_p,
    # Only an adapter's where the same module has on_input too; files.py sees to that.
    ("weight",): Role.ia3_weight,
    ("on_input",): Role.ia3_on_input,
    ("ia3_l",): Role.ia3_l,
    ("ia3_l", "*"): Role.ia3_l,
    ("diff",): Role.diff,
    ("diff_b",): Role.diff_b,
    ("set_weight",): Role.set_weight,
    ("w_norm",): Role.w_norm,
    ("b_norm",): Role.b_norm,
}


def split_suffix(key: str) -> tuple[str, Role, str | None] | None:
    """(module name with prefix, role, adapter's name) of ``key``, or None if its end is no adapter's.

    The longest suffix wins, and a literal one before one with an adapter's name in it.
    """
    parts = key.rsplit(".", 3)
    last = parts[-1]
    if len(parts) == 4:
        first, second = parts[1], parts[2]
        role = SUFFIXES.get((first, second, last))
        if role is not None:
            return parts[0], role, None
        role = SUFFIXES.get((first, "*", last))
        if role is not None:
            return parts[0], role, second
    if len(parts) >= 3:
        stem, second = ".".join(parts[:-2]), parts[-2]
        role = SUFFIXES.get((second, last))
        if role is not None:
            return stem, role, None
        role = SUFFIXES.get((second, "*"))
        if role is not None:
            return stem, role, last
        if last == "weight" and second in ("up", "down") and stem.endswith("_lora"):
            # The attention processors of old diffusers: X.processor.to_q_lora.down.weight
            return stem[: -len("_lora")].replace(".processor.", "."), Role(second), None
    if len(parts) >= 2:
        role = SUFFIXES.get((last,))
        if role is not None:
            return key[: -len(last) - 1], role, None
    return None


def strip_prefix(stem: str) -> str:
    """The module name without the prefixes that trainers and pipelines put in front."""
    for prefix in FLAT_PREFIXES:
        if stem.startswith(prefix):
            return stem[len(prefix):]
    stripped = True
    while stripped:
        stripped = False
        for prefix in DOTTED_PREFIXES:
            if stem.startswith(prefix):
                stem = stem[len(prefix):]
                stripped = True
    return stem


class Resolver:
    """Resolves the keys of one file in one family; each key and each module name is looked up once."""

    def __init__(self, family: Family):
        self.family = family
        self._resolved: dict[str, Resolved] = {}
        self._targets: dict[str, tuple[str, Target | None]] = {}

    def __call__(self, key: str) -> Resolved:
        """What ``key`` means; ``unknown`` is "" for one that does not resolve (nearest.py finds the reason)."""
        resolved = self._resolved.get(key)
        if resolved is None:
            resolved = self._resolved[key] = self._resolve(key)
        return resolved

    def _resolve(self, key):
        if _TEXT_ENCODER.match(key):
            return Resolved(key, skipped=TEXT_ENCODER)
        split = split_suffix(key)
        if split is None:
            return Resolved(key, unknown="")
        written, role, infix = split
        found = self._targets.get(written)
        if found is None:
            stem = strip_prefix(written)
            place = self.family.find(stem)
            found = self._targets[written] = stem, place and Target(*place)
        stem, target = found
        if target is None:
            return Resolved(key, stem, unknown="")
        return Resolved(key, stem, target, role, infix)


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

    return Resolved(key, resolved.stem, unknown=Nearest(candidates)(key))
