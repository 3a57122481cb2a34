"""Stand-in for the model object that ComfyUI puts around a diffusion model."""

import torch

import comfy.ops
from comfy.ldm.lumina.model import NextDiT


class Lumina2(torch.nn.Module):
    def __init__(self, config, device=None):
        super().__init__()
        dtype, cast_to = config.unet_config["dtype"], config.manual_cast_dtype
        operations = comfy.ops.disable_weight_init if cast_to in (None, dtype) else comfy.ops.manual_cast
        self.diffusion_model = NextDiT(**config.unet_config, operations=operations, device=device)

    def load_model_weights(self, state_dict, prefix=""):
        chosen = {key[len(prefix):]: value for key, value in state_dict.items() if key.startswith(prefix)}
        self.diffusion_model.load_state_dict(chosen, strict=False)
        return self
