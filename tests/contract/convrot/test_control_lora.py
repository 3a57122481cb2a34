"""A Control-LoRA of a real ComfyUI on a small SDXL-like UNet whose weights are quantized, and on the float one."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from convrot_reference import error, int8_layer, nvfp4_layer

pytestmark = pytest.mark.comfyui
CONFIG = dict(image_size=32, in_channels=4, model_channels=64, num_res_blocks=[1, 1], transformer_depth=[0, 1],
              channel_mult=[1, 2], transformer_depth_middle=1, context_dim=128, use_linear_in_transformer=True,
              num_head_channels=32, transformer_depth_output=[0, 0, 1, 1], use_spatial_transformer=True, legacy=False,
              num_classes="sequential", adm_in_channels=64)
#: A layer that the Control-LoRA changes.
CHANGED = "input_blocks.1.0.in_layers.2"


def randomized(module):
    for name, parameter in module.named_parameters():
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_(torch.full_like(parameter, float(name.endswith("weight"))))
    return module


@pytest.fixture
def unet(comfy):
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    def build(operations):
        return UNetModel(**CONFIG, out_channels=4, operations=operations, dtype=torch.float32)

    return build


@pytest.fixture
def control(comfy):
    """A function: the outputs of one Control-LoRA on a diffusion model."""
    controlnet = importlib.import_module("comfy.controlnet")
    full = randomized(comfy.cldm.cldm.ControlNet(**CONFIG, hint_channels=3, dtype=torch.float32,
                                                 operations=comfy.ops.disable_weight_init))
    own = {name: value.clone() for name, value in full.state_dict().items()
           if name.startswith(("input_hint", "zero_convs", "middle_block_out"))}
    shape = full.get_submodule(CHANGED).weight.shape
    own[f"{CHANGED}.up"], own[f"{CHANGED}.down"] = torch.randn(shape[0], 2, 1, 1) / 9, torch.randn(2, *shape[1:]) / 9
    inputs = {"x": torch.randn(2, 4, 16, 16), "hint": torch.randn(2, 3, 128, 128), "context": torch.randn(2, 7, 128),
              "timesteps": torch.tensor([10.0, 500.0]), "y": torch.randn(2, 64)}

    def run(diffusion_model):
        made = controlnet.ControlLora({**own, "lora_controlnet": torch.tensor([])})
        config = SimpleNamespace(unet_config={**CONFIG, "out_channels": 4})
        model = SimpleNamespace(model_config=config, manual_cast_dtype=None, get_dtype=lambda: torch.float32,
                                diffusion_model=diffusion_model, model_sampling=None)
        made.pre_run(model, lambda percent: 1.0)
        with torch.inference_mode():
            found = made.control_model(**inputs)
        return torch.cat([output.flatten() for output in (found["output"] if isinstance(found, dict) else found)])

    return run


@pytest.mark.parametrize("kind", ("int8", "nvfp4", "kernel"))
def test_it_steers_as_on_the_unquantized_model(comfy, formats, unet, control, kind):
    if kind not in formats:
        pytest.skip(f"this ComfyUI loads no {kind}")
    plain, make = randomized(unet(comfy.ops.disable_weight_init)), nvfp4_layer if kind == "nvfp4" else int8_layer
    entries = {}
    for key, value in plain.state_dict().items():
        layer, wanted = key.removesuffix("weight"), 4 if kind == "kernel" else 2
        if key.endswith(".weight") and value.dim() == wanted and value.shape[1] % 16 == 0 and "time_embed" not in key:
            entries.update({layer + name: tensor for name, tensor in make(value, 16).items()})
        else:
            entries[key] = value
    model = unet(comfy.ops.mixed_precision_ops({}, torch.float32, disabled={"nvfp4"}))
    model.load_state_dict(dict(entries), strict=True)
    assert error(control(model), control(plain)) < (0.2 if kind == "nvfp4" else 0.03)
