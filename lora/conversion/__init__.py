"""LoRA files in other spellings and forms: ``convert`` one, or ``merge`` a stack, then ``save``.

    adapters of a file -> entries (kept as they are, as factors, or approximated) -> split or fused -> keys -> file
"""

from .convert import convert
from .formats import FORMATS, Format
from .merge import merge
from .result import Result, save

__all__ = ["FORMATS", "Format", "Result", "convert", "merge", "save"]
