"""Where trainers and loaders disagree about the meaning of a file: which rule is followed.

The default is what ComfyUI does, because that is where people have tuned their strengths.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

CONVENTIONS = ("comfyui", "trainer")


@dataclass(frozen=True)
class AdapterConfig:
    """A PEFT configuration that diffusers and SimpleTuner put into a file's metadata."""

    rank: float | None = None
    alpha: float | None = None
    rank_pattern: Mapping[str, float] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False

    def rank_of(self, stem: str) -> float | None:
        """Rank of the module ``stem``."""
        return _of_module(stem, self.rank_pattern, self.rank)

    def alpha_of(self, stem: str) -> float | None:
        """Alpha of the module ``stem``."""
        return _of_module(stem, self.alpha_pattern, self.alpha)


#: A file's own regex can be made to take for ever: one with more repeats than a list of modules needs, or nested ones,
#: counts as one that does not fit, and so does a name of more characters than any module has.
_MOST_REPEATS, _LONGEST_NAME = 2, 120
_REPEATS = re.compile(r"[*+{]")
_NESTED = re.compile(r"\)[*+{]")


def _of_module(stem, patterns, default):
    """The value of the first pattern that fits: PEFT takes it for the end of the module's name, or a regex of it."""
    for pattern, value in patterns.items():
        if stem == pattern or stem.endswith("." + pattern) or _matches(pattern, stem):
            return float(value)
    return default


def _matches(pattern, stem):
    if len(stem) > _LONGEST_NAME or len(_REPEATS.findall(pattern)) > _MOST_REPEATS or _NESTED.search(pattern):
        return False
    try:
        return re.fullmatch(rf"(.*\.)?({pattern})", stem) is not None
    except (re.error, RecursionError, OverflowError):
        return False


def adapter_config(metadata: Mapping[str, str]) -> AdapterConfig | None:
    """The configuration in ``lora_adapter_metadata`` (JSON, keys "transformer.<name>"), or None."""
    try:
        table = json.loads(metadata.get("lora_adapter_metadata", ""))
    except (ValueError, RecursionError):
        return None
    if not isinstance(table, dict):
        return None
    found = {key.removeprefix("transformer."): value for key, value in table.items()}
    return AdapterConfig(
        rank=_number(found.get("r")),
        # PEFT's LoRA says lora_alpha, its LoHa and LoKr say alpha.
        alpha=_number(found.get("lora_alpha", found.get("alpha"))),
        rank_pattern=_numbers(found.get("rank_pattern")),
        alpha_pattern=_numbers(found.get("alpha_pattern")),
        rslora=found.get("use_rslora") is True,
    )


def _number(value):
    try:
        known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return value if known else None
    except OverflowError:
        # JSON has whole numbers beyond any float.
        return None


def _numbers(table):
    if not isinstance(table, dict):
        return {}
    return {key: value for key, value in table.items() if _number(value) is not None}


@dataclass(frozen=True)
class Rules:
    """How one file is read.

    ``convention``  "comfyui" or "trainer": whose formula decides for DoRA's norm and for OFT's
                    constraint, rescale and strength (adapters/dora.py and oft.py say what differs).
    ``config``      the metadata's configuration, if alpha is to be taken from it, else None.
    ``rslora``      the file carries the flag tensor that makes the scale alpha / sqrt(rank).
    """

    convention: str = "comfyui"
    config: AdapterConfig | None = None
    rslora: bool = False

    def __post_init__(self):
        if self.convention not in CONVENTIONS:
            raise ValueError(f"convention is one of {CONVENTIONS}, not {self.convention!r}")

    def scale(self, rank: float, alpha: float | None, stem: str) -> tuple[float, str]:
        """(factor of ``up @ down``, the rule in words) for a module of ``rank`` whose file says ``alpha``."""
        rslora, origin = self.rslora, "alpha"
        if alpha is None and self.config is not None:
            alpha, rslora, origin = self.config.alpha_of(stem), self.config.rslora, "alpha from the metadata"
        if alpha is None:
            return 1.0, "no alpha: scale 1"
        if rslora:
            return alpha / math.sqrt(rank), f"{origin} {alpha:g} / sqrt(rank {rank:g})"
        return alpha / rank, f"{origin} {alpha:g} / rank {rank:g}"
