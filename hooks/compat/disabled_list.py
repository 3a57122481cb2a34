"""Hook ``comfy-compat-disabled-list``: ``mixed_precision_ops(disabled=[...])``, where a set is wanted.

Node packs pass a list of formats, which is what ComfyUI's own default is; a release (or another pack's
wrapper) that treats the argument as a set stops there.
"""

from . import Repair, Spot, accepts


def _wants_a_set(original, module):
    if not accepts(original, "disabled"):
        return None
    try:
        original(disabled=["nvfp4"])
    except (AttributeError, TypeError) as error:
        return f"a list of disabled formats stops it: {error}"
    return None


def _make_a_set(original, module):
    def mixed_precision_ops(*args, **kwargs):
        if "disabled" in kwargs:
            kwargs["disabled"] = set(kwargs["disabled"] or ())
        elif len(args) > 3:
            args = (*args[:3], set(args[3] or ()), *args[4:])
        return original(*args, **kwargs)
    return mixed_precision_ops


REPAIR = Repair(
    Spot("mixed_precision_ops", _wants_a_set, _make_a_set, absent="this release has no mixed_precision_ops"),
    fine="a list of disabled formats is taken",
)
examine, patches = REPAIR.examine, REPAIR.patches
