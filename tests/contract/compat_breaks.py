"""Child program: does each known break on the real code, and prints what came of it as JSON.

    python compat_breaks.py COMFYUI_FOLDER NUNCHAKU_PARENT PACK
"""

import copy
import inspect
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "standins")]

import build_zimage


def outcome(function):
    """What ``function`` returns, or its exception as text."""
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def dynamic_vram(on):
    """Lazy Linears in here if ``on``, also in ComfyUI 0.15.0, where comfy.ops asks the command line."""
    import comfy.ops

    asks = vars(comfy.ops).get("enables_dynamic_vram")
    if asks is not None:
        comfy.ops.enables_dynamic_vram = lambda: on
    try:
        with build_zimage.dynamic_vram(on):
            yield
    finally:
        if asks is not None:
            comfy.ops.enables_dynamic_vram = asks


def pack(tail):
    return build_zimage.module_of_the_pack(tail)


def zimage(layers=1):
    build_zimage.TINY["n_layers"] = layers
    return build_zimage.build(False)


def zimage_patcher(model):
    import torch

    return pack("model_patcher.zimage").ZImageModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def qwen(lazy=False):
    import torch

    config = pack("model_configs.qwenimage").NunchakuQwenImage({
        "image_model": "qwen_image", "scale_shift": 0, "rank": 16, "precision": "int4", "num_layers": 1,
        "transformer_offload_device": None, "num_attention_heads": 1, "joint_attention_dim": 128})
    config.set_inference_dtype(torch.bfloat16, None)
    with dynamic_vram(lazy):
        return config.get_model({}, "", torch.device("cpu"))


def qwen_patcher(model):
    import torch

    ends = (".model_patcher.common", ".model_patcher")
    modules = [module for name, module in sys.modules.items() if name.endswith(ends)]
    cls = next(vars(module)["NunchakuModelPatcher"] for module in modules if "NunchakuModelPatcher" in vars(module))
    return cls(model, torch.device("cpu"), torch.device("cpu"))


def rotary():
    import torch

    module = sys.modules.get("comfy.ldm.qwen_image.model") or __import__("comfy.ldm.qwen_image.model", fromlist=["x"])
    x, angles = torch.randn(1, 4, 2, 8, dtype=torch.float64), torch.rand(4, 4, dtype=torch.float64) * 6
    table = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).reshape(1, 4, 1, 4, 2, 2)
    rotation = torch.polar(torch.ones_like(angles), angles)[None, :, None]
    turned = torch.view_as_complex(x.reshape(1, 4, 2, 4, 2)) * rotation
    return (module.apply_rotary_emb(x, table) - torch.view_as_real(turned).reshape(x.shape)).abs().max().item()


def clone():
    import comfy.model_patcher

    knows = inspect.signature(comfy.model_patcher.ModelPatcher.clone).parameters
    asked = {"disable_dynamic": True} if "disable_dynamic" in knows else {}
    patcher = zimage_patcher(zimage())
    made = patcher.clone(**asked)
    return [type(made) is type(patcher), made.model is patcher.model, made.svdq_backup is patcher.svdq_backup]


def returned_weight():
    import torch

    patcher, key = zimage_patcher(zimage()), "diffusion_model.x_embedder.weight"
    weight = patcher.model.diffusion_model.x_embedder.weight
    weight.data.zero_()
    # As merging and LoRA extraction hand over another model's weight.
    patcher.add_patches({key: [(torch.ones_like(weight), lambda value, **_: value)]}, 0.5)
    got = patcher.patch_weight_to_device(key, torch.device("cpu"), return_weight=True)
    return [got.unique().tolist(), weight.unique().tolist(), list(patcher.backup)]


def partial_unload():
    import comfy.sd
    import torch

    lora = {}
    for part in ("to_q", "to_k", "to_v", "to_out.0"):
        for name, shape in (("lora_A", (4, 256)), ("lora_B", (256, 4))):
            lora[f"diffusion_model.layers.0.attention.{part}.{name}.weight"] = torch.zeros(shape)
    patcher, _ = comfy.sd.load_lora_for_models(zimage_patcher(zimage()), None, lora, 1.0, 1.0)
    patcher.patch_model(torch.device("cpu"))
    return patcher.partially_unload(torch.device("cpu"), 1e32) > 0


def batch():
    """For each image of a batch, how far it is from the same image alone, relative."""
    import emulated_kernels
    import torch

    kernels, model = emulated_kernels.Kernels().install(), zimage(layers=2).diffusion_model
    generator = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if hasattr(layer, "qweight"):
            kernels.fill(layer, generator)
            continue
        for name, value in layer.named_parameters(recurse=False):
            drawn = torch.randn(value.shape, generator=generator) * value.shape[-1] ** -0.5
            value.data.copy_(drawn if value.ndim > 1 else torch.full(value.shape, float(name == "weight")))
    x = torch.randn(3, 16, 16, 16, generator=generator, dtype=torch.bfloat16)
    text = torch.randn(3, 7, 256, generator=generator, dtype=torch.bfloat16)

    def run(images):
        with torch.no_grad():
            return model(x[images], torch.full((len(x[images]),), 0.5), text[images], 7).float()

    alone = [run(slice(i, i + 1))[0] for i in range(3)]

    def errors(size):
        return [((image - want).norm() / want.norm()).item() for image, want in zip(run(slice(0, size)), alone)]

    return {str(size): outcome(lambda size=size: errors(size)) for size in (2, 3)}


def plain_dtypes():
    """{dtype of the file: dtypes that the plain layers of Qwen-Image end in, under dynamic VRAM}"""
    import torch

    found = {}
    packed = ("proj_", "smooth_", "wscales", "wzeros", "qweight", "wcscales")
    for dtype in (torch.float32, torch.float16):
        model, state = qwen(lazy=True), qwen().diffusion_model.state_dict()
        plain = [name for name in state if not any(part in name for part in packed)]
        state.update({name: state[name].to(dtype) for name in plain if state[name].is_floating_point()})
        with dynamic_vram(True):
            model.load_model_weights(state, "")
        layers = [model.diffusion_model.img_in, model.diffusion_model.txt_in, model.diffusion_model.proj_out]
        found[str(dtype)] = sorted({str(value.dtype) for layer in layers for value in layer.parameters()})
    return found


def moves():
    import comfy.model_management as management

    patcher = qwen_patcher(qwen())
    model, count = patcher.model.diffusion_model, []
    move = model.to_safely
    model.to_safely = lambda *args, **kwargs: (count.append(args), move(*args, **kwargs))[1]
    found = []
    for _ in range(3):
        management.load_models_gpu([patcher])
        found.append([len(count), patcher.loaded_size()])
    patcher.clone()
    found.append([len(count), patcher.loaded_size()])
    management.unload_all_models()
    return [*found, [len(count), patcher.loaded_size()], patcher.model_size()]


def misfits():
    import comfy.lora
    import torch
    from comfy.weight_adapter import LoRAAdapter

    def lora(up, down, *rest):
        return LoRAAdapter(set(), (torch.ones(up), torch.ones(down), *rest))

    cases = {
        "fits": (lora((8, 2), (2, 6), None, None, None, None), None),
        "slice outside": (lora((4, 2), (2, 6), None, None, None, None), (0, 6, 4)),
        "rank 0": (lora((8, 0), (0, 6), 1.0, None, None, None), None),
        "smaller reshape": (lora((4, 2), (2, 6), None, None, None, [4, 6]), None),
        "transposed": (lora((6, 2), (2, 8), None, None, None, None), None),
        "set of another size": (("set", (torch.ones(9, 6),)), None),
    }
    def added(what, offset):
        return comfy.lora.calculate_weight([(1.0, what, 1.0, offset, None)], torch.zeros(8, 6), "k").sum().item()

    return {name: outcome(lambda case=case: added(*case)) for name, case in cases.items()}


def key_map():
    """How many keys of the first model are among those of the second."""
    import comfy.lora
    import torch

    one, other = torch.nn.Module(), torch.nn.Module()
    one.first, other.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for model in (one, other):
        model.model_config = SimpleNamespace(unet_config={})
        model.diffusion_model = model.first if model is one else model.second
    keys = [comfy.lora.model_lora_keys_unet(model) for model in (one, other)]
    return keys[0] is keys[1]


def quantized():
    import comfy.model_patcher
    import comfy.ops
    import comfy.quant_ops
    import torch

    layout = comfy.quant_ops.QUANT_ALGOS["float8_e4m3fn"]["comfy_tensor_layout"]
    weight = comfy.quant_ops.QuantizedTensor.from_float(torch.randn(32, 32, dtype=torch.bfloat16), layout)
    configuration = torch.tensor(list(json.dumps({"format": "float8_e4m3fn"}).encode()), dtype=torch.uint8)
    state = {**weight.state_dict("layer.weight"), "layer.comfy_quant": configuration}
    model = torch.nn.Module()
    operations = comfy.ops.mixed_precision_ops({}, torch.bfloat16, disabled=["nvfp4"])
    model.layer = operations.Linear(32, 32, bias=False, device="cpu", dtype=torch.bfloat16)
    model.load_state_dict(state, strict=False)
    cpu = torch.device("cpu")

    def numbers(of):
        return of.layer.weight.dequantize()

    return {
        "copy": outcome(lambda: torch.equal(numbers(copy.deepcopy(model)), numbers(model))),
        "keys": outcome(lambda: list(comfy.model_patcher.ModelPatcher(model, cpu, cpu).get_key_patches())),
        "in a Parameter": isinstance(model.layer.weight, comfy.quant_ops.QuantizedTensor),
    }


def flux():
    import torch

    inside = torch.nn.Module()
    inside.img_in = torch.nn.Linear(2, 2)
    wrapper = pack("wrappers.flux").ComfyFluxWrapper(inside, {"patch_size": 2})
    return [wrapper.img_in is inside.img_in, wrapper.patch_size]


class Spy:
    """Passed as the image: when the model first asks something of it, it tells what the model was given."""

    @property
    def device(self):
        given = sys._getframe(1).f_locals
        raise LookupError(json.dumps({name: given[name] for name in given if isinstance(given[name], str)}))


def qwen_calls():
    """Under which names Qwen-Image receives what ComfyUI passes, and whether a block takes transformer_options."""
    module = pack("models.qwenimage")
    model = module.NunchakuQwenImageTransformer2DModel.__new__(module.NunchakuQwenImageTransformer2DModel)
    model.__dict__.update(_modules={}, _parameters={}, _buffers={}, offload=False)
    block = module.NunchakuQwenImageTransformerBlock.forward
    return {
        "given": outcome(lambda: model.forward(Spy(), "timestep", "context", "mask", "latents", None, {})),
        "block": outcome(lambda: block(None, 1, 2, 3, 4, transformer_options={})),
    }


BREAKS = (rotary, clone, returned_weight, partial_unload, batch, plain_dtypes, moves, misfits, key_map, quantized,
          flux, qwen_calls)


def main():
    loaded = build_zimage.start(*sys.argv[1:3], sys.argv[3:])
    found = {function.__name__: outcome(function) for function in BREAKS}
    found["config_copy"] = outcome(lambda: type(copy.deepcopy(zimage().model_config)).__name__)
    print("\n" + json.dumps({"loaded": loaded, "breaks": found, "hooks": build_zimage.hooks()}))


if __name__ == "__main__":
    main()
