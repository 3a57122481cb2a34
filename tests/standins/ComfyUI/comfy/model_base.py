"""Stand-in for the model objects that ComfyUI puts around a diffusion model."""

import torch

import comfy.ops
from comfy.ldm.lumina.model import NextDiT


class BaseModel(torch.nn.Module):
    family = None

    def __init__(self, config, unet_model, device=None):
        super().__init__()
        self.model_config = config
        dtype, cast_to = config.unet_config["dtype"], config.manual_cast_dtype
        operations = comfy.ops.disable_weight_init if cast_to in (None, dtype) else comfy.ops.manual_cast
        self.diffusion_model = unet_model(**config.unet_config, operations=operations, device=device)

    def load_model_weights(self, state_dict, prefix=""):
        chosen = {key[len(prefix):]: value for key, value in state_dict.items() if key.startswith(prefix)}
        self.diffusion_model.load_state_dict(chosen, strict=False)
        return self


class Lumina2(BaseModel):
    family = "z-image"

    def __init__(self, config, device=None):
        super().__init__(config, NextDiT, device)


class QwenImage(BaseModel):
    family = "qwen-image"

    def __init__(self, config, device=None, unet_model=None):
        from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

        super().__init__(config, unet_model or QwenImageTransformer2DModel, device)
