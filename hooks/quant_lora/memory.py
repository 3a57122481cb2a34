"""The memory of the factors, taken from what ComfyUI lets a model load."""

from __future__ import annotations

from . import branch, options, planning, weights
from .splitting import split

#: What ComfyUI itself passes for "as little as possible": 0 means no limit to it.
_LEAST = 0.1


def left(patcher, extra_memory: float) -> float:
    """What of ``extra_memory`` bytes remains for weights when the factors of ``patcher`` are there as well."""
    if extra_memory <= 0 or not patcher.patches:
        return extra_memory
    missing = planned(patcher) - attached(patcher.model)
    return max(extra_memory - missing, _LEAST) if missing > 0 else extra_memory


def planned(patcher) -> int:
    """Bytes of the factors that the patches of ``patcher`` become; at most, as long as nothing is predicted yet."""
    mode, plan = options.mode(), planning.of(patcher.model)
    if mode == options.BAKE:
        return 0
    if plan is not None and plan.uuid == patcher.patches_uuid and plan.mode == mode:
        found = [(choice.key, choice.split) for choice in plan.beside]
    else:
        found = [(key, _split(patcher.model, key, patches)) for key, patches in patcher.patches.items()]
    return sum(_nbytes(patcher.model, key, one) for key, one in found if one is not None)


def _split(model, key: str, patches: list[tuple]):
    layer = weights.layer_of(model, key)
    return None if layer is None else split(patches, tuple(weights.coarse(layer).shape))


def _nbytes(model, key: str, found) -> int:
    tensor = weights.coarse(weights.layer_of(model, key))
    return sum(one.term.rank for one in found.placed) * sum(tensor.shape) * tensor.dtype.itemsize


def attached(model) -> int:
    """Bytes of the factors that run in ``model`` now."""
    branches = (branch.of(module) for module in model.modules())
    return sum(one.fixed.nbytes for one in branches if one is not None and one.fixed is not None)
