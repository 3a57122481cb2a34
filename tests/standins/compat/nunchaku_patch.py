"""Stand-in for ComfyUI-QwenImageLoraLoader's patch module: it replaces another pack's function, for good."""

import sys


def _theirs(value):
    return "theirs", value


def apply_nunchaku_patch():
    sys.modules["target"].f = _theirs
    return True
