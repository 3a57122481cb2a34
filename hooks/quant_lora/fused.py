"""Hook on comfy.ops: a fused call that takes the weight of an INT8 layer and passes its forward by."""

from __future__ import annotations

from qpatch.finding import incompatible, needed, not_needed
from qpatch.patching import Wrap

from . import branch


def examine(module):
    if "linear_input_act" not in vars(module):
        return not_needed("this ComfyUI calls every quantized layer by its forward")
    if not isinstance(vars(module).get("INPUT_ACT_EAGER"), dict):
        return incompatible("linear_input_act is there, the table of its activations is not")
    return needed("linear_input_act takes the weight of an INT8 layer past its forward, and past a LoRA beside it")


def patches(module):
    return [Wrap(module, "linear_input_act", _by_forward(module))]


def _by_forward(ops):
    def make(original):
        def linear_input_act(linear, x, input_act, *args, **kwargs):
            found = branch.of(linear)
            if found is None:
                return original(linear, x, input_act, *args, **kwargs)
            return linear(ops.INPUT_ACT_EAGER[input_act](x))

        return linear_input_act

    return make
