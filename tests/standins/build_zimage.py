"""Child program: build a tiny Nunchaku Z-Image as ComfyUI does, and print what came of it as JSON.

    python build_zimage.py COMFYUI_FOLDER NUNCHAKU_PARENT PACK...

Runs alike on the stand-ins and on real checkouts: packs are loaded by ComfyUI's own
``nodes.load_custom_node``, in the order given. The model is built twice, with dynamic VRAM off
(``eager``) and on (``lazy``); the lazy one then loads the eager one's state dict, and is patched
a second time.
"""

import asyncio
import json
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

TINY = {
    "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "cap_feat_dim": 256, "n_layers": 1, "qk_norm": True,
    "dim": 256, "n_heads": 2, "n_kv_heads": 2, "axes_dims": [32, 48, 48], "axes_lens": [64, 64, 64],
    "rope_theta": 256.0, "ffn_dim_multiplier": 8.0 / 3.0, "z_image_modulation": True, "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}


def start(comfyui, nunchaku_parent, packs):
    """Import ComfyUI and load the node packs; {pack: whether it loaded}."""
    sys.path[:0] = [comfyui, nunchaku_parent]
    sys.argv[1:] = ["--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import folder_paths  # noqa: F401  (packs look for it in sys.modules)
    import nodes

    return {Path(pack).name: asyncio.run(nodes.load_custom_node(pack)) for pack in packs}


def module_of_the_pack(tail):
    """The pack's module whose name ends in ``tail``, and not in ``nodes.`` + ``tail``."""
    (name,) = [name for name in sys.modules if name.endswith("." + tail) and not name.endswith(".nodes." + tail)]
    return sys.modules[name]


@contextmanager
def dynamic_vram(on):
    """ComfyUI's Linears are lazy in here if ``on`` (up to ComfyUI 0.28 that needs Windows as well)."""
    import comfy.memory_management
    import comfy.model_management

    comfy.memory_management.aimdo_enabled = comfy.model_management.WINDOWS = on
    try:
        yield
    finally:
        comfy.memory_management.aimdo_enabled = comfy.model_management.WINDOWS = False


def build(lazy, **kwargs):
    """The tiny model, made under dynamic VRAM if ``lazy``."""
    import torch

    config = module_of_the_pack("model_configs.zimage").NunchakuZImage
    tiny = type("Tiny" + config.__name__, (config,), {"_DIT_CONFIG_": TINY})(rank=32, precision="int4")
    tiny.set_inference_dtype(torch.bfloat16, None)
    with dynamic_vram(lazy):
        return tiny.get_model({}, "", **kwargs)


def layers(model):
    """{name: (class, dtype, device, whether there is a bias)} of the quantized layers."""
    from nunchaku.models.linear import SVDQW4A4Linear

    return {
        name: [type(module).__name__, str(module.proj_down.dtype), str(module.qweight.device), module.bias is not None]
        for name, module in model.diffusion_model.named_modules() if isinstance(module, SVDQW4A4Linear)
    }


def lazy_linears(model):
    return [name for name, module in model.diffusion_model.named_modules() if getattr(module, "weight", 0) is None
            and getattr(module, "qweight", None) is None and hasattr(module, "in_features")]


def error_of(function):
    """The exception that ``function`` raises, as data; None if it raises none."""
    try:
        function()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return {"type": type(error).__name__, "text": str(error), "in": frame.name}
    return None


def loading_agrees(eager, lazy):
    """Whether ``lazy``, after loading numbers, has the very state dict that it loaded."""
    import torch

    generator = torch.Generator().manual_seed(0)
    numbers = {}
    for name, value in eager.diffusion_model.state_dict().items():
        drawn = torch.randint(-9, 9, value.shape, generator=generator)
        numbers[name] = drawn.to(value.dtype)
    with dynamic_vram(True):
        lazy.load_model_weights({name: value.clone() for name, value in numbers.items()}, "")
    got = lazy.diffusion_model.state_dict()
    return set(got) == set(numbers) and all(
        got[name].dtype == numbers[name].dtype and torch.equal(got[name], numbers[name]) for name in numbers
    )


def hooks():
    """{hook: its row of qpatch's report}; empty without qpatch."""
    try:
        from qpatch import states
    except ImportError:
        return {}
    return {row["hook"]: row for row in states.snapshot()}


def main():
    out = {"loaded": start(*sys.argv[1:3], sys.argv[3:])}
    import torch

    out["eager"] = layers(eager := build(False, torch_dtype=torch.float16))
    made = []
    out["error"] = error_of(lambda: made.append(build(True, torch_dtype=torch.float16)))
    if made:
        (lazy,) = made
        before = {id(module) for module in lazy.modules()}
        out["lazy"] = layers(lazy)
        undirected = []
        out["undirected error"] = error_of(lambda: undirected.append(build(True)))
        out["declared"] = sorted({row[1] for model in undirected for row in layers(model).values()})
        out["unfilled"] = lazy_linears(lazy)
        again = module_of_the_pack("models.zimage").patch_model
        out["second"] = error_of(lambda: again(lazy.diffusion_model, skip_refiners=False, rank=32, precision="int4",
                                               torch_dtype=torch.float16))
        out["unchanged"] = before == {id(module) for module in lazy.modules()}
        out["agrees"] = loading_agrees(eager, lazy)
    out["hooks"] = hooks()
    print("\n" + json.dumps(out))


if __name__ == "__main__":
    main()
