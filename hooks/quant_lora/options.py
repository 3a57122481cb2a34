"""The toggle of this hook."""

from __future__ import annotations

import functools
import os

from qpatch import log

#: Environment variable: ``side``, ``bake`` or ``auto``.
VARIABLE = "QPATCH_QUANT_LORA"
SIDE, BAKE, AUTO = "side", "bake", "auto"

#: With ``auto``, a delta goes into the weight where at least this share of it is predicted to survive there.
ENOUGH = 0.95


def mode() -> str:
    """What QPATCH_QUANT_LORA says: always beside the product, always into the weight, or by prediction."""
    return _mode(os.environ.get(VARIABLE, "").strip().lower())


@functools.cache
def _mode(text: str) -> str:
    if text and text not in (SIDE, BAKE, AUTO):
        log.warning(f"{VARIABLE}: '{text}' is none of {SIDE}, {BAKE}, {AUTO}; {AUTO} is used")
    return text if text in (SIDE, BAKE) else AUTO
