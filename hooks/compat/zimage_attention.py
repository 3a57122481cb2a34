"""Hook ``comfy-compat-zimage-attention``: Nunchaku's Z-Image attention has every setting that ComfyUI's forward reads.

ComfyUI-nunchaku 1.1 copies the settings of ComfyUI's attention one by one and runs ComfyUI's own
``forward``; a setting that came later (``qk_norm``) is missing. Settings that it did not copy are
copied from the attention that it replaces.
"""

import dis

from . import Repair, Spot

PLAIN = (bool, int, float, str, type(None))


def _uses(function, kind: str) -> set[str]:
    """The attributes that ``function`` stores (``STORE_ATTR``) or loads (``LOAD_ATTR``)."""
    return {step.argval for step in dis.get_instructions(function) if step.opname == kind}


def _copies_too_little(original, module):
    cls = module.ComfyNunchakuZImageAttention
    base = next(parent for parent in cls.__mro__[1:] if "forward" in vars(parent))
    own = vars(cls).get("forward")
    if own is not None and "super" not in own.__code__.co_names:
        return None
    wanted = _uses(base.forward, "LOAD_ATTR") & _uses(base.__init__, "STORE_ATTR")
    missing = sorted(wanted - _uses(original, "STORE_ATTR"))
    return f"ComfyUI's attention reads {', '.join(missing)}, which is not copied" if missing else None


def _copy_the_rest(original, module):
    def __init__(self, orig_attn, *args, **kwargs):
        original(self, orig_attn, *args, **kwargs)
        for name, value in vars(orig_attn).items():
            if not name.startswith("_") and isinstance(value, PLAIN) and not hasattr(self, name):
                setattr(self, name, value)
    return __init__


REPAIR = Repair(Spot("ComfyNunchakuZImageAttention.__init__", _copies_too_little, _copy_the_rest),
                fine="it has all that its forward reads")
examine, patches = REPAIR.examine, REPAIR.patches
