"""A plan in the modules of its model, and out again."""

from __future__ import annotations

import collections

from torch import nn

from . import branch, planning, standin, svdq, weights

#: What ComfyUI keeps of a weight that it replaces, as it reads it back.
_Backup = collections.namedtuple("Backup", ["weight", "inplace_update"])


def attach(patcher, plan: planning.Plan) -> None:
    """Bring the model of ``patcher`` to ``plan``; what is right already stays."""
    # Bypass mode replaces forwards as well, and puts back the one that it found: ours goes in before, and out after.
    with patcher.use_ejected():
        _attach(patcher, plan)


def _attach(patcher, plan: planning.Plan) -> None:
    wanted = {choice.key: choice for choice in plan.beside}
    model = patcher.model
    for path, module in _with_branches(model):
        if f"{path}.weight" not in wanted:
            branch.remove(module, fixed=True)
    for key, choice in wanted.items():
        module = weights.layer_of(model, key)
        if module is None:
            continue
        pair = plan.pair(choice, weights.coarse(module), patcher.load_device)
        if pair is not None:
            _put(patcher, key, module, pair)


def _put(patcher, key: str, module: nn.Module, pair) -> None:
    if svdq.appended(module):
        return
    if _stays(patcher, module) and svdq.fits(weights.coarse(module), pair):
        # As if ComfyUI had baked it: from here it puts the original back.
        if key not in patcher.backup:
            patcher.backup[key] = _Backup(module.weight, False)
        svdq.append(module, pair)
        branch.remove(module, fixed=True)
    else:
        branch.put(module, fixed=pair)


def _stays(patcher, module: nn.Module) -> bool:
    """Whether ComfyUI keeps the weight of ``module`` on the device until it unpatches the model."""
    return not patcher.is_dynamic() and getattr(module, "comfy_patched_weights", False) is True


def detach(model: nn.Module) -> None:
    """Take everything out that :func:`attach` and the schedule put in; ComfyUI has put its backups back."""
    for _, module in _with_branches(model):
        branch.remove(module, fixed=True, scheduled=True)
    for module in model.modules():
        svdq.forget(module)
        standin.forget(module)
    plan = planning.of(model)
    if plan is not None:
        # They are on the device that the model has left.
        plan.pairs.clear()


def _with_branches(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(path, module) for path, module in model.named_modules() if branch.of(module) is not None]
