"""Stand-in for the patcher of Nunchaku Z-Image: plain LoRA on all of q, k, v and both of w1, w3, or an assertion."""

import uuid

from comfy.lora import model_lora_keys_unet
from comfy.model_patcher import ModelPatcher
from comfy.weight_adapter import LoRAAdapter


class ZImageModelPatcher(ModelPatcher):
    def clone(self):
        return super().clone()

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        with self.use_ejected():
            known = set(model_lora_keys_unet(self.model).values())
            taken = [key for key in patches if key in known]
            for key in taken:
                name, offset = (key, None) if isinstance(key, str) else key
                self.patches.setdefault(name, []).append((strength_patch, patches[key], strength_model, offset, None))
            self.patches_uuid = uuid.uuid4()
            return taken

    def patch_weight_to_device(self, key, device_to=None, inplace_update=False):
        assert key not in self.patches or key.endswith(".weight"), f"Unexpected key: {key}"
        if not key.endswith(".qweight"):
            return super().patch_weight_to_device(key, device_to, inplace_update)
        found = self.patches.get(key.replace(".qweight", ".weight"), [])
        assert all(isinstance(patch[1], LoRAAdapter) for patch in found)
        assert not (found and ".qkv." in key) or len(found) % 3 == 0
