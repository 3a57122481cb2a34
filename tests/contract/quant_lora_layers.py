"""Quantized Linears of a real ComfyUI under its patchers, and LoRAs for them with their dense changes."""

import pytest
import torch
from quant_lora_twins import CPU, NO_PRODUCT

OUT, IN, RMS = 128, 512, 0.03


class Model(torch.nn.Module):
    """What a ModelPatcher asks of a model, around quantized Linears of ComfyUI's."""

    def __init__(self, layers):
        super().__init__()
        self.diffusion_model = torch.nn.ModuleDict(layers)
        self.model_lowvram, self.lowvram_patch_counter, self.device = False, 0, None
        self.model_loaded_weight_memory = self.model_offload_buffer_memory = 0
        self.current_weight_patches_uuid = None

    def state_dict_for_saving(self, unet_state_dict, **others):
        return unet_state_dict


def layer(comfy, name, dtype=torch.float32, out=OUT, inp=IN):
    algorithms = comfy.quant_ops.QUANT_ALGOS
    form, convrot = ("int8_tensorwise", True) if name == "int8_convrot" else (name, False)
    if form not in algorithms:
        pytest.skip(f"this ComfyUI has no {form}")
    ops = comfy.ops.mixed_precision_ops({}, dtype, disabled=[name] if name in NO_PRODUCT else [])
    made = ops.Linear(inp, out, bias=True, dtype=dtype)
    layout = algorithms[form]["comfy_tensor_layout"]
    settings = {"per_channel": True, "convrot": True} if convrot else {}
    settings.update({"scale": "recalculate"} if form.startswith(("float8", "nvfp4")) else {})
    weight = comfy.quant_ops.QuantizedTensor.from_float((torch.randn(out, inp) * RMS).to(dtype), layout, **settings)
    made.weight, made.layout_type, made.quant_format = torch.nn.Parameter(weight, requires_grad=False), layout, form
    made._full_precision_mm = name in NO_PRODUCT
    made.bias = torch.nn.Parameter(torch.randn(out, dtype=dtype), requires_grad=False)
    made.weight_function, made.bias_function = [], []
    return made


def patcher_of(comfy, *names, **kinds):
    model = Model({name: layer(comfy, name, **kinds) for name in names})
    patcher = comfy.model_patcher.ModelPatcher(model, CPU, CPU)
    patcher.partially_load(CPU, 1e32)
    return patcher


def lora(comfy, rank, size, alpha=None, out=OUT, inp=IN):
    """(adapter, dense change at strength 1) whose rms is ``size`` times that of the weight."""
    up, down = torch.randn(out, rank, dtype=torch.float64), torch.randn(rank, inp, dtype=torch.float64)
    up *= size * RMS / (up @ down).square().mean().sqrt()
    scale = 1.0 if alpha is None else rank / alpha
    adapter = comfy.weight_adapter.LoRAAdapter(set(), ((up * scale).float(), down.float(), alpha, None, None, None))
    return adapter, up @ down


def loaded(patcher, name, *adapters, strength=1.0, memory=1e32):
    clone = patcher.clone()
    for adapter in adapters:
        clone.add_patches({f"diffusion_model.{name}.weight": adapter}, strength)
    clone.partially_load(CPU, memory)
    return clone
