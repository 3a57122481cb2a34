"""Hook ``convrot``, comfy.ops: NVFP4 layers that declare ``convrot`` get the rotated layout, and keep it when saved.

ComfyUI's loader ignores the declaration: such a layer multiplies un-rotated activations with a rotated weight,
which is noise, LoRA is added in the wrong basis, and a saved file has lost the declaration. With the rotated
layout (layouts.py) as the type of the weight all of that is right where it is, without a wrap on any of it.

From ComfyUI 0.24 on the loader and the writer are two functions of comfy.ops, looked up by name at each call.
Before, their code is inside the Linear class that ``mixed_precision_ops`` makes at each call; then its two
methods are wrapped as the class is made.
"""

from __future__ import annotations

from qpatch.finding import Finding, incompatible
from qpatch.patching import Wrap, dress

from . import config, hswq, kitchen

_FUNCTIONS = ("_load_quantized_module", "_quantized_weight_state_dict")


def examine(module) -> Finding:
    reason = kitchen.unusable()
    if reason is not None:
        return incompatible(reason)
    if config.NVFP4 not in vars(module).get("QUANT_ALGOS", {}):
        return incompatible("this ComfyUI loads no NVFP4 files")
    if not has_loader(module) and not _has_methods(module):
        return incompatible("comfy.ops loads quantized layers in neither of the two ways that this hook knows")
    from . import probe

    return probe.nvfp4(module)


def patches(module):
    if has_loader(module):
        yield Wrap(module, "_load_quantized_module", adopting(module, config.NVFP4_LAYOUT))
        yield Wrap(module, "_quantized_weight_state_dict", lambda original: _writing(original))
    else:
        yield Wrap(module, "mixed_precision_ops", _teaching)


def has_loader(module) -> bool:
    """Whether comfy.ops loads and saves quantized layers through functions of its own (0.24 and later)."""
    return all(name in vars(module) for name in _FUNCTIONS)


def _has_methods(module) -> bool:
    linear = module.mixed_precision_ops().Linear
    return "_load_from_state_dict" in vars(linear) and "state_dict" in vars(linear)


def adopting(comfy_ops, layout: str):
    """A maker of loaders that give a layer which ComfyUI puts into ``layout`` the basis that it declares."""
    from . import adoption

    def make(original):
        def load_quantized_module(module, super_load, state_dict, prefix, *args, **kwargs):
            declared = adoption.announce(module, state_dict, prefix)
            result = original(module, super_load, state_dict, prefix, *args, **kwargs)
            if declared is not None and declared.group_size is not None:
                if not hswq.owns(module, vars(comfy_ops)["_load_quantized_module"], load_quantized_module):
                    adoption.adopt(module, declared.group_size, layout, prefix)
            return result

        return load_quantized_module

    return make


def _writing(original):
    from . import saving

    def quantized_weight_state_dict(module, sd, prefix, *args, **kwargs):
        return saving.declare(module, original(module, sd, prefix, *args, **kwargs), prefix)

    return quantized_weight_state_dict


def _teaching(original):
    """``mixed_precision_ops`` of ComfyUI before 0.24, whose Linear classes read and write the declaration."""
    def mixed_precision_ops(*args, **kwargs):
        made = original(*args, **kwargs)
        linear = made.Linear
        linear._load_from_state_dict = dress(_load_method(linear._load_from_state_dict), linear._load_from_state_dict)
        linear.state_dict = dress(_save_method(linear.state_dict), linear.state_dict)
        return made

    return mixed_precision_ops


def _load_method(original):
    from . import adoption

    def _load_from_state_dict(self, state_dict, prefix, *args):
        declared = adoption.announce(self, state_dict, prefix)
        original(self, state_dict, prefix, *args)
        if declared is not None and declared.group_size is not None:
            adoption.adopt(self, declared.group_size, config.NVFP4_LAYOUT, prefix)

    return _load_from_state_dict


def _save_method(original):
    from . import saving

    def state_dict(self, *args, destination=None, prefix="", **kwargs):
        sd = original(self, *args, destination=destination, prefix=prefix, **kwargs)
        return saving.declare(self, sd, prefix)

    return state_dict
