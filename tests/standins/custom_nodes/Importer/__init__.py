"""Stand-in for any pack that imports nunchaku on its own and keeps copies of its names."""

from nunchaku.models.linear import AWQW4A16Linear, SVDQW4A4Linear  # noqa: F401
from nunchaku.models.utils import fuse_linears  # noqa: F401

NODE_CLASS_MAPPINGS = {}
