from . import transformer_zimage  # noqa: F401
