"""Hook ``comfy-compat-plain-dtype``: the unquantized layers of a Nunchaku model get the dtype they declare.

Under dynamic VRAM a Linear takes over the dtype of the checkpoint, and ComfyUI's dynamic patcher
casts when it runs. Nunchaku's patchers do not, so a file whose plain layers are float32 or float16
ends in "mat1 and mat2 must have the same dtype". Without dynamic VRAM loading casts; so does this,
on the way in: the state dict that the layers are handed holds cast copies, the file's tensors
(memory-mapped, perhaps) stay as they are.
"""

import sys
from functools import partial

import torch

from . import Repair, Spot


def declared(model: torch.nn.Module) -> dict[str, torch.dtype]:
    """{parameter name: dtype that its layer declares} for the layers of ``model`` that are not filled yet."""
    found = {}
    for name, layer in model.named_modules():
        weight = vars(layer).get("weight", layer._parameters.get("weight"))
        if "weight_comfy_model_dtype" not in vars(layer) or not (weight is None or weight.is_meta):
            continue
        for part in ("weight", "bias"):
            dtype = vars(layer).get(part + "_comfy_model_dtype")
            if dtype is not None:
                found[f"{name}.{part}"] = dtype
    return found


def cast(dtypes, state_dict, prefix, *_):
    """A hook of ``load_state_dict``, which has made its own dict of the tensors before it asks."""
    for name, dtype in dtypes.items():
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype:
            state_dict[prefix + name] = value.to(dtype)


def _keeps_the_file_s_dtype(original, module):
    base = vars(sys.modules["comfy.ops"])["disable_weight_init"]
    if "comfy_need_lazy_init_bias" not in base.Linear.__init__.__code__.co_names:
        return None
    load = vars(base).get("_lazy_load_from_state_dict")
    if load is None:
        casts = "weight_comfy_model_dtype" in base.Linear._load_from_state_dict.__code__.co_names
    else:
        layer = torch.nn.Module()
        layer.weight, layer.weight_comfy_model_dtype = None, torch.bfloat16
        load.__get__(None, base)(layer, {"weight": torch.zeros(1, 1)}, "", {}, [], [], weight_shape=(1, 1))
        casts = layer.weight.dtype == torch.bfloat16
    return None if casts else "lazy Linears keep the dtype of the checkpoint"


def _cast_on_load(original, module):
    def get_model(self, *args, **kwargs):
        model = original(self, *args, **kwargs)
        dtypes = declared(model.diffusion_model)
        if dtypes:
            model.diffusion_model._register_load_state_dict_pre_hook(partial(cast, dtypes))
        return model
    return get_model


def spots(module):
    return [Spot(f"{name}.get_model", _keeps_the_file_s_dtype, _cast_on_load)
            for name in ("NunchakuZImage", "NunchakuQwenImage") if name in vars(module)]


REPAIR = Repair(spots, fine="layers get the dtype they declare")
examine, patches = REPAIR.examine, REPAIR.patches
