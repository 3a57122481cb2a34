"""Hook ``comfy-compat-control-lora``: a Control-LoRA on a model with quantized weights.

A Control-LoRA is a copy of the model it steers, with small changes: it borrows the model's weights from the
state dict. A quantized weight stands there as its integers, which give a black picture (INT8), or as packed
ones, which do not multiply (NVFP4). It is lent the numbers that they stand for.
"""

from qpatch.hooks.quant_lora import branch
from qpatch.lora.modules.kitchen import quantized

from . import Repair, Spot


def _borrows_what_is_stored(original, module):
    names = original.__code__.co_names
    if "state_dict" not in names or "set_attr_param" not in names:
        raise LookupError("it does not borrow weights in the way that is known")
    return None if "dequantize" in names else "it borrows the integers of quantized weights"


def lent(layer):
    """The weight of ``layer`` as it acts, in float, if it is quantized; else None."""
    weight = layer._parameters.get("weight")
    tensor = None if weight is None else quantized(weight)
    if tensor is None:
        return None
    dense = tensor.dequantize()
    # In a model that is not quantized, a LoRA is in the weights that are borrowed.
    beside = branch.change(layer, dense)
    return dense if beside is None else dense + beside


def _lend(original, module):
    set_attr_param = module.comfy.utils.set_attr_param

    def pre_run(self, model, *args, **kwargs):
        result = original(self, model, *args, **kwargs)
        for name, layer in model.diffusion_model.named_modules():
            weight = None if f"{name}.weight" in self.control_weights else lent(layer)
            if weight is None:
                continue
            try:
                set_attr_param(self.control_model, f"{name}.weight", weight)
            except AttributeError:
                # The half of the model that it does not copy.
                pass
        return result
    return pre_run


REPAIR = Repair(Spot("ControlLora.pre_run", _borrows_what_is_stored, _lend),
                fine="a Control-LoRA borrows the numbers of quantized weights")
examine, patches = REPAIR.examine, REPAIR.patches
