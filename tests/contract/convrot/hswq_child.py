"""Child process of test_hswq_pack: the pack's loader, its purge, its loader again, beside qpatch, on one ComfyUI.

    python hswq_child.py COMFYUI_FOLDER PACK_FOLDER

Prints JSON: for each moment and kind of layer, the layout of the weight, the marks of the pack on the layer,
and the errors of the forward before and after a LoRA bake.
"""

import importlib
import json
import sys
import types

folder, pack = sys.argv[1:]
sys.path.insert(0, folder)
sys.argv = ["main.py", "--cpu"]
importlib.import_module("comfy.options").enable_args_parsing()

import torch
from convrot_reference import error, int8_layer, load, nvfp4_layer

ops = importlib.import_module("comfy.ops")
for name in ("sd", "model_patcher", "model_detection"):
    importlib.import_module(f"comfy.{name}")


def packages():
    """The pack's folders as packages, without running the __init__ that registers nodes with a server."""
    for name in ("", ".nodes", ".patches", ".nodes.nvfp4", ".nodes.zimage_nvfp4"):
        package = types.ModuleType(f"hswq{name}")
        package.__path__ = [pack + name.replace(".", "/")]
        sys.modules[package.__name__] = package


def observe():
    weight, x = torch.randn(96, 256), torch.randn(20, 256)
    found = {}
    for kind, entries in (("nvfp4", nvfp4_layer(weight, 64)), ("int8", int8_layer(weight, 64))):
        if {"nvfp4": "nvfp4", "int8": "int8_tensorwise"}[kind] not in ops.QUANT_ALGOS:
            continue
        layer = ops.mixed_precision_ops({}, torch.float32, disabled={"nvfp4"}).Linear(256, 96, bias=False)
        load(layer, entries)
        before = error(layer(x), x @ weight.t())
        layer.set_weight(layer.convert_weight(layer.weight) * 2, seed=0)
        found[kind] = {"layout": layer.weight._layout_cls, "marks": [key for key in vars(layer) if "hswq" in key],
                       "error": before, "error with LoRA": error(layer(x), 2 * x @ weight.t())}
    return found


torch.manual_seed(0)
packages()
loader = importlib.import_module("hswq.nodes.zimage_nvfp4.load_unet")
parity = importlib.import_module("hswq.nodes.zimage_nvfp4.nvfp4_comfy_parity")
moments = {"at the start": observe()}
for round in ("first", "second"):
    loader.apply_nvfp4_patches()
    moments[f"{round} time active"] = observe()
    parity.peel_non_product_nvfp4_ops(ops)
    moments[f"{round} time purged"] = observe()
print("JSON " + json.dumps(moments))
