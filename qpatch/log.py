"""Log lines in ComfyUI's manner: the ``logging`` tree, one line each, ``qpatch:`` in front."""

import logging
import sys

from . import toggles

_logger = logging.getLogger("qpatch")


def _say(level: int, text: str) -> None:
    if level < toggles.log_level():
        return
    if not toggles.log_level_given():
        _logger.log(level, "qpatch: %s", text)
    elif _logger.hasHandlers():
        # Asked for by name, so it is not the level of the root logger that decides.
        _logger.handle(_logger.makeRecord(_logger.name, level, __file__, 0, "qpatch: %s", (text,), None))
    elif sys.stderr is not None:
        # Nobody has set up logging yet, which then drops everything below a warning.
        print(f"qpatch: {text}", file=sys.stderr)


def debug(text: str) -> None:
    _say(logging.DEBUG, text)


def info(text: str) -> None:
    _say(logging.INFO, text)


def warning(text: str) -> None:
    _say(logging.WARNING, text)
