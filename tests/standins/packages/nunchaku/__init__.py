"""Stand-in for nunchaku: importing it imports its models, as upstream's does."""

from .models import transformers  # noqa: F401
