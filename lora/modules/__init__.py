"""The kinds of modules that can hold a LoRA. Which kind a module is follows from what it has, never from its name."""

from __future__ import annotations

from torch import nn

from .awq import AWQSite
from .change import MARK, Change
from .kitchen import KitchenBranchSite, KitchenSite, KitchenSVDQSite, quantized
from .plain import LinearSite
from .site import Draft, Part, Site
from .svdq import SVDQSite

__all__ = ["MARK", "Change", "Draft", "Part", "Site", "holds_low_rank", "recognise"]


def recognise(path: str, module: nn.Module, attribute: str = "weight", prefix: str = "") -> Site | None:
    """The site that ``module`` is, or None for a class that is not known to hold a weight.

    ``attribute`` and ``prefix``: names of the parameters where a module holds those of another one,
    as NunchakuZImageFusedModule does (``norm_q_weight``, ``qkv_proj_down``).
    """
    if hasattr(module, prefix + "proj_down") and hasattr(module, prefix + "proj_up"):
        return SVDQSite(path, module, prefix)
    if all(hasattr(module, name) for name in ("qweight", "wscales", "wzeros")):
        return AWQSite(path, module)
    weight = getattr(module, attribute, None)
    if quantized(weight) is not None:
        return _kitchen(path, module)
    if hasattr(module, attribute):
        return LinearSite(path, module, attribute)
    return None


def _kitchen(path: str, module: nn.Module) -> Site:
    params = quantized(module.weight)._params
    if hasattr(params, "proj_down"):
        return KitchenSVDQSite(path, module)
    return KitchenBranchSite(path, module) if hasattr(params, "zeros") else KitchenSite(path, module)


def holds_low_rank(module: nn.Module) -> bool:
    """Whether ``module`` is one of nunchaku's quantized layers."""
    return hasattr(module, "qweight") and (hasattr(module, "proj_down") or hasattr(module, "wzeros"))
