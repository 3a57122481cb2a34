"""A tiny Z-Image or Qwen-Image of a real ComfyUI, the matrices of its blocks quantized, and its float twin.

``comfy`` is the package of the checkout.
"""

import contextlib
import importlib.util
import json
from pathlib import Path

import torch
from emulation import tiny, world

FORMATS = ("nvfp4", "mxfp8", "float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "int8_convrot", "convrot_w4a4",
           "asym_w4a8_int8")
#: Formats whose product a CPU does not have: ComfyUI computes them with the dequantized weight.
NO_PRODUCT = ("nvfp4", "mxfp8")
CPU = torch.device("cpu")
#: Family -> class of comfy.supported_models, its settings, how the names of the modules with quantized matrices begin.
FAMILIES = {"z-image": ("ZImage", world.ZIMAGE, ("layers", "noise", "context")),
            "qwen-image": ("QwenImage", world.QWEN, ("transformer_blocks",))}

_spec = importlib.util.spec_from_file_location("real_comfyui", Path(__file__).with_name("convrot") / "conftest.py")
real = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(real)


def available(comfy) -> list[str]:
    """The formats that this ComfyUI reads."""
    algorithms = comfy.quant_ops.QUANT_ALGOS
    return [name for name in FORMATS if name.replace("int8_convrot", "int8_tensorwise") in algorithms]


def stored(comfy, name: str, weight: torch.Tensor) -> tuple[dict, torch.Tensor]:
    """What a checkpoint holds of ``weight`` [out, in] in the format ``name``, and the numbers that it stands for."""
    form, settings = name.replace("int8_convrot", "int8_tensorwise"), {}
    configuration = {"format": form}
    if name == "int8_convrot":
        settings = {"per_channel": True, "convrot": True}
        configuration.update(convrot=True, convrot_groupsize=256)
    if form.startswith(("float8", "nvfp4")):
        settings = {"scale": "recalculate"}
    layout = comfy.quant_ops.QUANT_ALGOS[form]["comfy_tensor_layout"]
    quantized = comfy.quant_ops.QuantizedTensor.from_float(weight, layout, **settings)
    text = torch.tensor(list(json.dumps(configuration).encode()), dtype=torch.uint8)
    return {**quantized.state_dict("weight"), "comfy_quant": text}, quantized.dequantize().float()


class Twins:
    """``patcher``: of the quantized model. ``names``: its quantized layers. ``plain``: the same numbers in float32."""

    def __init__(self, comfy, name: str, family: str = "z-image"):
        self.comfy, self.name, self.family = comfy, name, family
        self.plain = self._config().get_model({}, "")
        tiny.randomize(self.plain.diffusion_model, seed=1)
        self.entries = {key: value.clone() for key, value in self.plain.diffusion_model.state_dict().items()}
        self.names = [path for path, module in self.plain.diffusion_model.named_modules()
                      if isinstance(module, torch.nn.Linear) and path.startswith(FAMILIES[family][2])]
        for path in self.names:
            weight = self.entries.pop(f"{path}.weight")
            found, values = stored(comfy, name, weight)
            self.entries.update({f"{path}.{key}": value for key, value in found.items()})
            self.plain.diffusion_model.get_submodule(path).weight.data = values
        self.patcher, self.x = self.fresh(), world.inputs(family)

    def _config(self):
        cls, settings, _ = FAMILIES[self.family]
        config = getattr(self.comfy.supported_models, cls)(dict(settings))
        config.set_inference_dtype(torch.float32, None)
        return config

    def fresh(self, *_, entries=None, **__):
        """A patcher of a newly loaded quantized model; the signature is that of ComfyUI's own factories."""
        config = self._config()
        config.custom_operations = self.comfy.ops.mixed_precision_ops({}, torch.float32, disabled=list(NO_PRODUCT))
        model = config.get_model({}, "")
        model.load_model_weights(dict(entries or self.entries), "")
        return self.comfy.model_patcher.ModelPatcher(model, CPU, CPU)

    def in_float(self, patcher=None):
        """A clone of the patcher whose products are computed with the dequantized weights, by weight functions."""
        clone = (patcher or self.patcher).clone()
        for path in self.names:
            clone.add_weight_wrapper(f"diffusion_model.{path}.weight", _unchanged)
        return clone

    def run(self, patcher, **more) -> torch.Tensor:
        self.comfy.model_management.load_models_gpu([patcher])
        return evaluate(patcher.model, self.x, **more)

    def wanted(self, changes: dict, **more) -> torch.Tensor:
        """The output of the float twin with ``changes`` (name -> dense) added to its weights."""
        with added(self.plain.diffusion_model, changes):
            return evaluate(self.plain, self.x, **more)

    def beside(self, changes: dict) -> torch.Tensor:
        """The output of the quantized model with its own products, and the dense ``changes`` times each layer's input
        added in float64: what the format gives a LoRA that nothing is lost of."""
        layers = {path: self.patcher.model.diffusion_model.get_submodule(path) for path in changes}
        self.comfy.model_management.load_models_gpu([self.patcher])
        handles = [layer.register_forward_hook(_adding(changes[path])) for path, layer in layers.items()]
        try:
            return evaluate(self.patcher.model, self.x)
        finally:
            for handle in handles:
                handle.remove()

    def sample(self, patcher, hooks=None, control=None, steps=2) -> torch.Tensor:
        """What ComfyUI's sampler makes of noise under ``patcher`` in ``steps``, with hooks or a ControlNet."""
        options = {"control": control, "control_apply_to_uncond": True} if control is not None else {}
        conditioning = [[self.x["context"], options]]
        if hooks is not None:
            conditioning = self.comfy.hooks.set_hooks_for_conditioning(conditioning, hooks)
        noise = self.x["x"]
        return self.comfy.sample.sample(patcher, noise, steps, 1.0, "euler", "simple", conditioning, conditioning,
                                        torch.zeros_like(noise), disable_pbar=True, seed=0).double()

    def lora(self, rank: int, size: float, names=None) -> tuple[dict, dict]:
        """A LoRA file whose changes have ``size`` times the rms of their weights, and the changes by layer."""
        file, changes = {}, {}
        for path in names or self.names:
            weight = self.plain.diffusion_model.get_submodule(path).weight.double()
            up, down = (torch.randn(*shape).double() for shape in ((len(weight), rank), (rank, weight.shape[1])))
            up *= size * rms(weight) / rms(up @ down)
            file[f"diffusion_model.{path}.lora_B.weight"] = up.float()
            file[f"diffusion_model.{path}.lora_A.weight"] = down.float()
            changes[path] = up @ down
        return file, changes

    def with_loras(self, patcher, loras, strength: float):
        """(clone of ``patcher`` with the files of ``loras`` as a LoRA node leaves it, the sum of their changes)"""
        total = {}
        for file, changes in loras:
            patcher, _ = self.comfy.sd.load_lora_for_models(patcher, None, file, strength, 0.0)
            total = {**total, **{path: total.get(path, 0) + strength * change for path, change in changes.items()}}
        return patcher, total


def rms(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.square().mean().sqrt()


def _adding(change: torch.Tensor):
    def hook(module, arguments, output):
        return output + (arguments[0].double() @ change.T).to(output.dtype)

    return hook


def _unchanged(weight: torch.Tensor) -> torch.Tensor:
    return weight


@contextlib.contextmanager
def added(model, changes: dict):
    """For the time of the block the float weights of ``model`` have ``changes`` in them."""
    layers = {path: model.get_submodule(path) for path in changes}
    before = {path: layer.weight.data for path, layer in layers.items()}
    for path, layer in layers.items():
        layer.weight.data = (before[path].double() + changes[path]).float()
    try:
        yield
    finally:
        for path, layer in layers.items():
            layer.weight.data = before[path]


def evaluate(model, x: dict, **more) -> torch.Tensor:
    with torch.no_grad():
        return model.diffusion_model(**{**x, "transformer_options": {}, **more}).double()


def agreement(found, wanted) -> tuple[float, float]:
    """(cosine, ratio of the norms)"""
    found, wanted = found.double().flatten(), wanted.double().flatten()
    return (found @ wanted / (found.norm() * wanted.norm())).item(), (found.norm() / wanted.norm()).item()


def error(found, wanted) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()
