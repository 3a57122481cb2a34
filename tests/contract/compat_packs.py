"""Child program: node packs beside qpatch, loaded by ComfyUI in the order given; prints who stands where as JSON.

    python compat_packs.py COMFYUI_FOLDER NUNCHAKU_PARENT PACK...

The packs' prestartup scripts run first, as ComfyUI runs them. A pack that patches only when its loader
node runs (HSWQ) is asked to do it now.
"""

import importlib
import json
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "standins"))

import build_zimage

#: Functions of packs that patch ComfyUI when a loader node of theirs runs.
LATER = (
    (".patches.comfy_quant_int8", "apply_comfy_quant_int8_patches"),
    (".nodes.nvfp4.comfy_quant_nvfp4", "apply_comfy_quant_nvfp4_patches"),
)


def prestart(packs):
    for pack in packs:
        script = Path(pack) / "prestartup_script.py"
        if script.exists():
            runpy.run_path(str(script))


def patch_later(packs):
    """{function: what it answered} for each function of LATER that a pack has."""
    found = {}
    for pack in packs:
        for module, function in LATER:
            try:
                found[function] = getattr(importlib.import_module(str(pack).replace(".", "_x_") + module), function)()
            except ModuleNotFoundError:
                continue
            except AttributeError as error:
                # Before 0.24 ComfyUI does not have what the pack wants to patch.
                found[function] = str(error)
    return found


def depths():
    """{place of a patch: how often its hook's layer stands there}"""
    from qpatch import layers, states
    from qpatch.catalogue import HOOKS

    found = {}
    for hook in HOOKS:
        for attempt in states.attempts(hook):
            for patch in attempt.patches:
                stack = layers.layers(vars(patch.owner).get(patch.name))
                found[f"{hook.name}: {patch!r}"] = sum(layers.marked(layer, hook.name) for layer in stack)
    return found


def main():
    packs = sys.argv[3:]
    prestart(packs)
    loaded = build_zimage.start(*sys.argv[1:3], packs)
    answers = patch_later(packs)
    print("\n" + json.dumps({"loaded": loaded, "later": answers, "depths": depths(), "hooks": build_zimage.hooks()}))


if __name__ == "__main__":
    main()
