"""comfy_kitchen: whether the installed one is of a kind these hooks know."""

from __future__ import annotations

import importlib

#: The oldest release that was tried; the newest is whatever still has what is named here.
OLDEST = (0, 2, 10)
NEEDED = ("QuantizedTensor", "TensorCoreNVFP4Layout", "get_layout_class", "register_layout_class", "register_layout_op")


def unusable() -> str | None:
    """Why ConvRot layouts cannot be built on the installed comfy_kitchen, in words; None if they can."""
    try:
        tensor = importlib.import_module("comfy_kitchen.tensor")
    except Exception as error:
        return f"comfy_kitchen cannot be imported ({error})"
    missing = [name for name in NEEDED if name not in vars(tensor)]
    if missing:
        return f"comfy_kitchen {version()} has no {', '.join(missing)} (known to work: 0.2.10 to 0.2.40)"
    if _numbers(version()) < OLDEST:
        return f"comfy_kitchen {version()} is older than 0.2.10, the first release that is known to work"
    return None


def version() -> str:
    """The installed version, "0" when nothing tells it."""
    try:
        from importlib_metadata import version as installed

        return installed("comfy-kitchen")
    except Exception:
        # Vendored or on PYTHONPATH without metadata: what it defines decides then, not its number.
        return ".".join(map(str, OLDEST))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())
