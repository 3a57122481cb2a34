"""Stand-in for nunchaku's compiled part: its functions are set by whoever runs the layers."""

from . import ops  # noqa: F401
