"""What a patcher's patches become: beside the product, or baked by ComfyUI."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field

from . import kept, options, weights
from .pair import Pair, compose
from .splitting import Split, split

#: Attribute of a model: the plan of the patcher that was loaded last.
_PLAN = "_qpatch_quant_lora"

#: Attributes of a patcher with which it loads weights in another way than others.
_SPECIAL = ("hook_patches", "forced_hooks", "weight_wrapper_patches", "force_cast_weights")


@dataclass(frozen=True, eq=False)
class Choice:
    """One coarse weight that has patches.

    ``side``      whether ComfyUI sees only what ``split`` leaves to be baked; if not, it bakes all.
    ``predicted`` the kept share of baking the terms, or None if the format is not known.
    ``rest_kept`` that of what is baked in either case; None if it is not known or nothing is.
    """

    key: str
    split: Split
    side: bool
    predicted: float | None
    rest_kept: float | None


@dataclass(eq=False)
class Plan:
    """What one set of patches becomes.

    ``uuid``   ComfyUI's name for the set.
    ``plain``  whether nothing else of the patcher changes how weights are loaded.
    ``baked``  the patches that ComfyUI is to see, by key.
    ``told``   whether the user has been told of it.
    """

    uuid: object
    mode: str
    plain: bool = True
    choices: dict[str, Choice] = field(default_factory=dict)
    baked: dict[str, list] = field(default_factory=dict)
    pairs: dict[tuple, Pair | None] = field(default_factory=dict)
    told: bool = False

    def __deepcopy__(self, memo):
        # A clone of the model for another GPU: a plan names no modules and is not written to, but for its pairs.
        return Plan(self.uuid, self.mode, self.plain, self.choices, self.baked, told=self.told)

    @property
    def beside(self) -> list[Choice]:
        """What runs beside the product."""
        return [choice for choice in self.choices.values() if choice.side and choice.split.placed]

    def left(self, patches: dict) -> dict:
        """``patches`` without what runs beside: what ComfyUI is to see while it patches."""
        found = dict(patches)
        for choice in self.choices.values():
            if not choice.side:
                continue
            found.pop(choice.key, None)
            if choice.split.rest:
                found[choice.key] = choice.split.rest
        return found

    def pair(self, choice: Choice, tensor, device) -> Pair | None:
        """The pair of ``choice`` on ``device``, composed once."""
        where = choice.key, str(device)
        if where not in self.pairs:
            self.pairs[where] = compose(choice.split.placed, tuple(tensor.shape), tensor.dtype, device)
        return self.pairs[where]


def of(model) -> Plan | None:
    """The plan that ``model`` was loaded with last, or None."""
    return vars(model).get(_PLAN)


def plan(patcher) -> Plan:
    """The plan for the patches of ``patcher``: the one its model has, if it is for the same patches.

    Worked out while the weights are ComfyUI's originals: patches that change the set have been undone by then.
    """
    last, mode = of(patcher.model), options.mode()
    if last is not None and last.uuid == patcher.patches_uuid and last.mode == mode:
        return last
    found = Plan(patcher.patches_uuid, mode, not any(getattr(patcher, name, None) for name in _SPECIAL))
    for key, patches in patcher.patches.items():
        choice = choose(patcher.model, key, patches, mode)
        if choice is not None:
            found.choices[key] = choice
    found.baked = found.left(patcher.patches)
    setattr(patcher.model, _PLAN, found)
    return found


def choose(model, key: str, patches: list[tuple], mode: str) -> Choice | None:
    """The way for the patches of ``key``; None if it is no coarse weight."""
    layer = weights.layer_of(model, key) if patches else None
    if layer is None:
        return None
    tensor = weights.coarse(layer)
    found = split(patches, tuple(tensor.shape))
    if not found.placed:
        return Choice(key, found, mode != options.BAKE, None, _kept_of_rest(tensor, found))
    predicted = kept.of_terms(tensor, found.placed)
    side = mode == options.SIDE or (mode == options.AUTO and (predicted is None or predicted < options.ENOUGH))
    return Choice(key, found, side, predicted, _kept_of_rest(tensor, found))


def _kept_of_rest(tensor, found: Split) -> float | None:
    if not found.norms or found.unknown:
        return None
    return kept.predict(tensor, math.hypot(*(norm() for norm in found.norms)), tensor.shape[0] * tensor.shape[1])


@contextlib.contextmanager
def reduced(patcher, found: Plan):
    """For the time of the block ``patcher`` has only the patches that ComfyUI is to bake."""
    if not any(choice.side for choice in found.choices.values()):
        yield
        return
    whole = patcher.patches
    patcher.patches = found.left(whole)
    try:
        yield
    finally:
        patcher.patches = whole
