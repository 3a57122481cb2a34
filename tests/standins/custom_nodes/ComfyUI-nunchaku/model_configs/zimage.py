"""Stand-in for the model configuration: ComfyUI builds the model, then its blocks are exchanged."""

from comfy.supported_models import ZImage

from ..models.zimage import patch_model


class NunchakuZImage(ZImage):
    _DIT_CONFIG_ = {"dim": 3840, "n_heads": 30, "n_layers": 30, "cap_feat_dim": 2560, "ffn_dim_multiplier": 8 / 3}

    def __init__(self, rank=32, precision="int4", skip_refiners=False):
        super().__init__(unet_config=self._DIT_CONFIG_)
        self.rank, self.precision, self.skip_refiners = rank, precision, skip_refiners

    def get_model(self, state_dict, prefix="", device=None, **kwargs):
        out = super().get_model(state_dict, prefix, device)
        patch_model(out.diffusion_model, skip_refiners=self.skip_refiners, rank=self.rank, precision=self.precision,
                    **kwargs)
        return out
