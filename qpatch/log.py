"""Log lines in ComfyUI's manner: the ``logging`` tree, one line each, ``qpatch:`` in front."""

import logging

from . import toggles

_logger = logging.getLogger("qpatch")


def _say(level: int, text: str) -> None:
    if level >= toggles.log_level():
        _logger.log(level, "qpatch: %s", text)


def debug(text: str) -> None:
    _say(logging.DEBUG, text)


def info(text: str) -> None:
    _say(logging.INFO, text)


def warning(text: str) -> None:
    _say(logging.WARNING, text)
