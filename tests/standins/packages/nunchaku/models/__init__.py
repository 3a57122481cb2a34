from . import text_encoders, transformers  # noqa: F401
