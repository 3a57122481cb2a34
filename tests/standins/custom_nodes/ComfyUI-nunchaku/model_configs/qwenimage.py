"""Stand-in for the description of Nunchaku Qwen-Image."""

import comfy.model_base
from comfy.supported_models import QwenImage

from ..models.qwenimage import NunchakuQwenImageTransformer2DModel


class NunchakuQwenImage(QwenImage):
    def get_model(self, state_dict, prefix="", device=None, **kwargs):
        return comfy.model_base.QwenImage(self, device=device, unet_model=NunchakuQwenImageTransformer2DModel)
