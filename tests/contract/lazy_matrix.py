"""Child program: the mended functions of the real nunchaku on lazy and on filled Linears of the real ComfyUI.

    python lazy_matrix.py COMFYUI_FOLDER NUNCHAKU_PARENT PACK

Prints JSON: for each case, what the layer made of lazy Linears is, and what it is for filled ones.
"""

import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "standins"))

import build_zimage


def kinds(layer):
    """Class, parameters with shape, dtype and device, as data."""
    tensors = {name: [list(t.shape), str(t.dtype), str(t.device)] for name, t in layer.named_parameters()}
    return [type(layer).__name__, tensors]


def outcome(make, linears, **asked):
    """What ``make`` makes, or the name of the error that it raises."""
    try:
        return kinds(make(*linears, **asked))
    except (AssertionError, AttributeError, TypeError) as error:
        return type(error).__name__


def functions():
    """{name: (function, how many Linears it takes)}"""
    from nunchaku.models.linear import AWQW4A16Linear, SVDQW4A4Linear
    from nunchaku.models.text_encoders.linear import W4Linear
    from nunchaku.models.utils import fuse_linears

    def of_three(*linears, **asked):
        return SVDQW4A4Linear.from_linear(fuse_linears(list(linears)), **asked)

    def empty_w4(linear, torch_dtype=None):
        return W4Linear.from_linear(linear, 128, init_only=True)

    return {
        "SVDQW4A4Linear.from_linear": (SVDQW4A4Linear.from_linear, 1),
        "AWQW4A16Linear.from_linear": (AWQW4A16Linear.from_linear, 1),
        "W4Linear.from_linear": (empty_w4, 1),
        "fuse_to_svdquant_linear": (build_zimage.module_of_the_pack("models.zimage").fuse_to_svdquant_linear, 2),
        "fuse_linears": (of_three, 3),
    }


def kinds_of_linear():
    """The Linear classes of comfy.ops that a model is built from."""
    import comfy.ops

    names = ("disable_weight_init", "manual_cast", "fp8_ops", "cublas_ops")
    return {name: vars(comfy.ops)[name].Linear for name in names if name in vars(comfy.ops)}


def cases():
    import torch

    asked = ({}, {"torch_dtype": torch.float16})
    every = itertools.product(kinds_of_linear().items(), functions().items(), (False, True), asked)
    for (ops, linear), (name, (function, count)), bias, more in every:
        def some(lazy, linear=linear, bias=bias, count=count):
            with build_zimage.dynamic_vram(lazy):
                return [linear(128, 256, bias=bias, dtype=torch.bfloat16) for _ in range(count)]

        sources = some(lazy=True)
        before = [dict(vars(source)) for source in sources]
        yield {
            "case": f"{name}, {ops}, bias={bias}, {more}",
            "was lazy": all(source.weight is None for source in sources),
            "lazy": outcome(function, sources, **more),
            "filled": outcome(function, some(lazy=False), **more),
            "untouched": before == [vars(source) for source in sources],
        }


def attributes():
    """Names that make up a lazy Linear, in ComfyUI and in the probe of the hooks."""
    from qpatch.hooks.lazy_probe import UnfilledLinear

    with build_zimage.dynamic_vram(True):
        real = kinds_of_linear()["manual_cast"](4, 4)
    return sorted(vars(real)), sorted(vars(UnfilledLinear(bias=True)))


if __name__ == "__main__":
    build_zimage.start(*sys.argv[1:3], sys.argv[3:4])
    print("\n" + json.dumps({"cases": list(cases()), "attributes": attributes()}))
