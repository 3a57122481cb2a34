"""Stand-in for ComfyUI-nunchaku's Z-Image patcher: overrides with the signatures of an older ComfyUI."""

from comfy.model_patcher import ModelPatcher


class ZImageModelPatcher(ModelPatcher):
    def __init__(self, model, load_device="cpu", offload_device="cpu", size=0, weight_inplace_update=False):
        super().__init__(model, load_device, offload_device, size, weight_inplace_update=False)
        self.svdq_backup = {}

    def clone(self):
        n = ModelPatcher.clone(self)
        n.svdq_backup = self.svdq_backup
        return n

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        super().unpatch_model(device_to, unpatch_weights)
        self.svdq_backup.clear()

    def patch_weight_to_device(self, key, device_to=None, inplace_update=False):
        assert inplace_update is False
        self.log.append(("patched", key))
        setattr(self.model, key, getattr(self.model, key) + self.patches.get(key, 0))
