"""Stand-in for ComfyUI's description of Z-Image, which makes the model."""

from comfy.model_base import Lumina2


class ZImage:
    def __init__(self, unet_config):
        self.unet_config = dict(unet_config)
        self.manual_cast_dtype = None

    def set_inference_dtype(self, dtype, manual_cast_dtype):
        self.unet_config["dtype"] = dtype
        self.manual_cast_dtype = manual_cast_dtype

    def get_model(self, state_dict, prefix="", device=None):
        return Lumina2(self, device=device)
