"""Stand-in for ComfyUI's conditioning hooks that carry a LoRA, with a strength for each step."""

import comfy.lora


class _HookRef:
    pass


class WeightHook:
    def __init__(self, strength_model=1.0):
        self.hook_ref = _HookRef()
        self.weights = None
        self.need_weight_init = True
        self._strength_model = strength_model
        self.strength = 1.0

    def clone(self):
        twin = WeightHook(self._strength_model)
        twin.hook_ref, twin.weights, twin.need_weight_init = self.hook_ref, self.weights, self.need_weight_init
        twin.strength = self.strength
        return twin

    def __eq__(self, other):
        return type(self) is type(other) and self.hook_ref is other.hook_ref

    def __hash__(self):
        return hash(self.hook_ref)

    def add_hook_patches(self, model, registered):
        names = comfy.lora.model_lora_keys_unet(model.model, {})
        weights = comfy.lora.load_lora(self.weights, names, log_missing=False)
        model.add_hook_patches(hook=self, patches=weights, strength_patch=self._strength_model)
        registered.append(self)


class HookGroup:
    def __init__(self, hooks=()):
        self.hooks = list(hooks)

    def clone(self):
        return HookGroup(hook.clone() for hook in self.hooks)

    def __eq__(self, other):
        return isinstance(other, HookGroup) and self.hooks == other.hooks

    __hash__ = None


def create_hook_lora(lora, strength_model, strength_clip):
    hook = WeightHook(strength_model)
    hook.weights = lora
    return HookGroup([hook])
