"""What the user reads: one line for each load with new patches, and what of a change does not survive."""

from __future__ import annotations

import sys
from collections import defaultdict

from qpatch import log

from . import branch, planning, svdq


def tell(plan: planning.Plan) -> None:
    """How many layers went which way, and why the others did not; once for each set of patches."""
    if plan.told or not plan.choices:
        return
    plan.told = True
    beside = plan.beside
    baked = [choice for choice in plan.choices.values() if not choice.side and choice.split.placed]
    if beside or baked:
        log.info(_ways(plan, beside, baked))
    _tell_rest(plan)


def _ways(plan: planning.Plan, beside, baked) -> str:
    sizes = [pair.nbytes for pair in plan.pairs.values() if pair is not None]
    text = f"quant-lora: {len(beside)} layers beside the quantized product"
    if beside:
        text += f" ({sum(sizes) / 2**20:.1f} MB{_lost(beside)})"
    if baked:
        text += f"; {len(baked)} baked by ComfyUI ({_range([c.predicted for c in baked])} predicted to be kept)"
    return text


def _lost(beside) -> str:
    known = [choice.predicted for choice in beside if choice.predicted is not None]
    return f"; baked, {_range(known)} would be kept" if known else ""


def _tell_rest(plan: planning.Plan) -> None:
    grouped = defaultdict(list)
    for choice in plan.choices.values():
        for reason in dict.fromkeys(choice.split.reasons):
            grouped[reason].append(choice)
    for reason, choices in grouped.items():
        known = [choice.rest_kept for choice in choices if choice.rest_kept is not None]
        share = f"{_range(known)} of it predicted to be kept" if known else "how much of it is kept is not predicted"
        log.warning(f"quant-lora: baked in {len(choices)} layers ({share}), because {reason}: {choices[0].key}")


def _range(shares) -> str:
    shares = [share for share in shares if share is not None]
    if not shares:
        return "an unknown share"
    low, high = round(min(shares) * 100), round(max(shares) * 100)
    return f"{low} %" if low == high else f"{low} to {high} %"


def baked_for_saving(plan: planning.Plan) -> None:
    """The weights go to a file: what ran beside them has to go into them."""
    shares = _range([choice.predicted for choice in plan.beside])
    log.warning(f"quant-lora: for saving, the LoRA of {len(plan.beside)} layers is added to their quantized weights; "
                f"{shares} of it predicted to be kept there")


def details() -> str | None:
    """For ``qpatch status``: the layers of the models that are loaded in this process; None if there are none."""
    management = sys.modules.get("comfy.model_management")
    models = {id(loaded.model.model): loaded.model.model for loaded in getattr(management, "current_loaded_models", ())
              if loaded.model is not None}
    beside = baked = 0
    for model in models.values():
        plan = planning.of(model)
        beside += sum(branch.of(module) is not None or svdq.appended(module) for module in model.modules())
        baked += sum(not choice.side or bool(choice.split.rest) for choice in plan.choices.values()) if plan else 0
    return f"{beside} layers with LoRA beside the product, {baked} with LoRA baked" if models else None
