"""Stand-in for ComfyUI's descriptions of models, which make them."""

from comfy.model_base import Lumina2
from comfy.model_base import QwenImage as QwenImageModel


class _Description:
    model = None

    def __init__(self, unet_config):
        self.unet_config = dict(unet_config)
        self.manual_cast_dtype = None

    def set_inference_dtype(self, dtype, manual_cast_dtype):
        self.unet_config["dtype"] = dtype
        self.manual_cast_dtype = manual_cast_dtype

    def get_model(self, state_dict, prefix="", device=None):
        return self.model(self, device=device)


class ZImage(_Description):
    model = Lumina2


class QwenImage(_Description):
    model = QwenImageModel
