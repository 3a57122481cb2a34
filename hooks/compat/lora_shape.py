"""Hook ``comfy-compat-lora-shape``: a LoRA tensor that does not fit its weight is skipped with a line.

ComfyUI skips the plainest misfits itself. Others stop the workflow (a slice outside the weight, a
rank of zero, factors that do not match, a reshape to a smaller weight), and a LoRA made for the
transposed weight is added as noise, because the numbers of elements agree.
"""

import torch

from qpatch import log

from . import Repair, Spot


def _stops(original, module):
    weight = torch.zeros(8, 6)
    outside = (1.0, ("diff", (torch.zeros(4, 6),)), 1.0, (0, 6, 4), None)
    try:
        original([outside], weight, "probe.weight")
    except (RuntimeError, IndexError, ValueError):
        return "a LoRA tensor that does not fit stops the workflow"
    return None


def misfit(patch, shape) -> str | None:
    """Why ``patch`` is not one for a weight of ``shape``, as far as shapes tell; None if it may be.

    ``patch`` is ComfyUI's (strength, what, model strength, slice (axis, start, length) or None, function).
    """
    what, part = patch[1], patch[3]
    weights = getattr(what, "weights", None)
    if getattr(what, "name", None) != "lora" or len(shape) != 2 or weights[5] is not None or weights[3] is not None:
        return None
    up, down = weights[0], weights[1]
    if up.ndim < 2 or down.ndim < 2:
        return None
    wanted = [part[2] if part is not None and part[0] == axis else size for axis, size in enumerate(shape)]
    given = [up.shape[0], down.shape[1:].numel()]
    return f"it changes a weight of {given}" if given != wanted else None


def _skip(original, module):
    def calculate_weight(patches, weight, key, *args, **kwargs):
        for patch in patches:
            weight = _one(original, patch, weight, key, args, kwargs)
        return weight
    return calculate_weight


def _one(original, patch, weight, key, args, kwargs):
    reason = misfit(patch, tuple(weight.shape))
    # ComfyUI scales the weight in place before it looks at the rest.
    before = weight.clone() if reason is None and patch[2] != 1.0 else weight
    if reason is None:
        try:
            return original([patch], weight, key, *args, **kwargs)
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:
            if _is_the_device_s(error):
                raise
            reason = str(error)
    log.warning(f"LoRA skipped for {key}, a weight of {list(weight.shape)}: {reason}")
    return before


def _is_the_device_s(error: Exception) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("out of memory", "cuda error", "hip error", "alloc"))


REPAIR = Repair(Spot("calculate_weight", _stops, _skip), fine="a LoRA tensor that does not fit is skipped")
examine, patches = REPAIR.examine, REPAIR.patches
