"""Stand-in for the patcher of Nunchaku Qwen-Image: it moves the model and knows no patches."""

from comfy.model_patcher import ModelPatcher


class NunchakuModelPatcher(ModelPatcher):
    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        with self.use_ejected():
            self.model.diffusion_model.to_safely(device_to)

    def detach(self, unpatch_all=True):
        self.eject_model()
        self.model.diffusion_model.to_safely(self.offload_device)
