"""The families of models whose LoRAs are composed, and how to tell a file's family.

To add one: write a module with a :class:`Family` like qwen_image.py, and list it in ``FAMILIES``.
"""

from __future__ import annotations

from .family import Block, Family, Module
from .qwen_image import QWEN_IMAGE
from .z_image import Z_IMAGE

__all__ = ["Block", "Family", "Module", "FAMILIES", "get"]

FAMILIES: dict[str, Family] = {family.name: family for family in (QWEN_IMAGE, Z_IMAGE)}


def get(family: str | Family) -> Family:
    """The family called ``family`` ("qwen-image", "z-image"); ``ValueError`` names the known ones."""
    if isinstance(family, Family):
        return family
    if family in FAMILIES:
        return FAMILIES[family]
    raise ValueError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")
