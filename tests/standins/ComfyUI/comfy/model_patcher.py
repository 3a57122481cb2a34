"""Stand-in for ComfyUI's patcher: clones that share a model, and when it is patched, injected and taken back."""

import contextlib
import uuid

import comfy.lora
import comfy.utils
from comfy.patcher_extension import CallbacksMP


class _Shared:
    """What all clones of a patcher hold together."""

    def __init__(self):
        self.backup, self.object_patches_backup = {}, {}


class ModelPatcher:
    def __init__(self, model, load_device, offload_device, size=0, weight_inplace_update=False):
        self.model, self.load_device, self.offload_device = model, load_device, offload_device
        self.shared = _Shared()
        self.patches, self.object_patches = {}, {}
        self.patches_uuid = uuid.uuid4()
        self.parent = None
        self.attachments, self.callbacks, self.injections = {}, {}, {}
        self.is_injected = self.skip_injection = False
        self.hook_patches, self.hook_patches_backup, self.current_hooks = {}, None, None
        self.model_options = {"transformer_options": {}}
        if not hasattr(model, "current_weight_patches_uuid"):
            model.current_weight_patches_uuid, model.loaded = None, False

    @property
    def backup(self):
        return self.shared.backup

    def is_dynamic(self):
        return False

    def model_size(self):
        return sum(tensor.nbytes for tensor in self.model.state_dict().values())

    def is_clone(self, other):
        return getattr(other, "model", None) is self.model

    def clone(self):
        twin = type(self)(self.model, self.load_device, self.offload_device)
        twin.shared, twin.parent = self.shared, self
        twin.patches = {key: list(value) for key, value in self.patches.items()}
        twin.object_patches = dict(self.object_patches)
        twin.patches_uuid = self.patches_uuid
        twin.attachments = {key: value.on_model_patcher_clone() if hasattr(value, "on_model_patcher_clone") else value
                            for key, value in self.attachments.items()}
        twin.callbacks = {kind: {key: list(calls) for key, calls in group.items()}
                          for kind, group in self.callbacks.items()}
        twin.injections = {key: list(value) for key, value in self.injections.items()}
        # As upstream does it, although nothing was injected in the clone's name.
        twin.is_injected, twin.skip_injection = self.is_injected, self.skip_injection
        twin.hook_patches = {key: dict(value) for key, value in self.hook_patches.items()}
        twin.current_hooks = self.current_hooks and self.current_hooks.clone()
        for call in self.get_all_callbacks(CallbacksMP.ON_CLONE):
            call(self, twin)
        return twin

    def set_attachments(self, key, attachment):
        self.attachments[key] = attachment

    def get_attachment(self, key):
        return self.attachments.get(key)

    def set_injections(self, key, injections):
        self.injections[key] = injections

    def get_injections(self, key):
        return self.injections.get(key)

    def add_callback_with_key(self, kind, key, callback):
        self.callbacks.setdefault(kind, {}).setdefault(key, []).append(callback)

    def get_all_callbacks(self, kind):
        return [call for calls in self.callbacks.get(kind, {}).values() for call in calls]

    def _sort(self, patches, strength_patch, strength_model, into):
        known, taken = self.model.state_dict(), []
        for key, patch in patches.items():
            name, offset = (key, None) if isinstance(key, str) else key
            if name in known:
                into.setdefault(name, []).append((strength_patch, patch, strength_model, offset, None))
                taken.append(key)
        self.patches_uuid = uuid.uuid4()
        return taken

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        with self.use_ejected():
            return self._sort(patches, strength_patch, strength_model, self.patches)

    def add_hook_patches(self, hook, patches, strength_patch=1.0, strength_model=1.0):
        with self.use_ejected():
            mine = self.hook_patches.setdefault(hook.hook_ref, {})
            return self._sort(patches, strength_patch, strength_model, mine)

    @contextlib.contextmanager
    def use_ejected(self, skip_and_inject_on_exit_only=False):
        before, was_injected = self.skip_injection, self.is_injected
        self.skip_injection = before or skip_and_inject_on_exit_only
        self.eject_model()
        try:
            yield
        finally:
            self.skip_injection = before
            if was_injected or skip_and_inject_on_exit_only:
                self.inject_model()

    def inject_model(self):
        if self.is_injected or self.skip_injection:
            return
        for injection in [one for group in self.injections.values() for one in group]:
            injection.inject(self)
            self.is_injected = True

    def eject_model(self):
        if self.is_injected:
            for injection in [one for group in self.injections.values() for one in group]:
                injection.eject(self)
            self.is_injected = False

    def model_state_dict(self, filter_prefix=None):
        with self.use_ejected():
            return {key: value for key, value in self.model.state_dict().items() if key.startswith(filter_prefix or "")}

    def get_key_patches(self, filter_prefix=None):
        found = {}
        for key in self.model_state_dict(filter_prefix):
            weight = self.backup[key] if key in self.backup else comfy.utils.get_attr(self.model, key)
            found[key] = [(weight, lambda weight, **_: weight), *self.patches.get(key, [])]
        return found

    def state_dict_for_saving(self):
        return self.model.state_dict()

    def patch_weight_to_device(self, key, device_to=None, inplace_update=False, return_weight=False):
        weight = comfy.utils.get_attr(self.model, key)
        if key not in self.patches:
            return weight
        patched = comfy.lora.calculate_weight(self.patches[key], weight, key)
        if return_weight:
            return patched
        self.backup.setdefault(key, weight)
        comfy.utils.set_attr_param(self.model, key, patched)

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        with self.use_ejected():
            self.unpatch_hooks()
            if not self.model.loaded:
                for key, _ in list(self.model.named_parameters()):
                    self.patch_weight_to_device(key, device_to=device_to)
                    self.model.get_submodule(key.rpartition(".")[0]).comfy_patched_weights = True
            self.model.to(device_to)
            self.model.loaded = True
            self.model.current_weight_patches_uuid = self.patches_uuid
            for call in self.get_all_callbacks(CallbacksMP.ON_LOAD):
                call(self, device_to, lowvram_model_memory, force_patch_weights, full_load)

    def patch_model(self, device_to=None, lowvram_model_memory=0, load_weights=True, force_patch_weights=False):
        with self.use_ejected():
            for name, value in self.object_patches.items():
                self.shared.object_patches_backup.setdefault(name, comfy.utils.set_attr(self.model, name, value))
            if load_weights:
                self.load(device_to, full_load=True)
        self.inject_model()
        return self.model

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        self.eject_model()
        if unpatch_weights:
            self.unpatch_hooks()
            for key, weight in self.backup.items():
                comfy.utils.set_attr(self.model, key, weight)
            self.backup.clear()
            for module in self.model.modules():
                vars(module).pop("comfy_patched_weights", None)
            self.model.current_weight_patches_uuid, self.model.loaded = None, False
            if device_to is not None:
                self.model.to(device_to)
        for name, value in self.shared.object_patches_backup.items():
            comfy.utils.set_attr(self.model, name, value)
        self.shared.object_patches_backup.clear()

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            standing = self.model.current_weight_patches_uuid
            self.unpatch_model(self.offload_device, unpatch_weights=standing not in (None, self.patches_uuid))
            self.patch_model(load_weights=False)
            if not self.model.loaded:
                self.load(device_to, full_load=True)

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False):
        with self.use_ejected():
            for module in self.model.modules():
                if not list(module.children()):
                    module.to(device_to)
        return memory_to_free

    def detach(self, unpatch_all=True):
        self.eject_model()
        if unpatch_all:
            self.unpatch_model(self.offload_device, unpatch_weights=True)
        for call in self.get_all_callbacks(CallbacksMP.ON_DETACH):
            call(self, unpatch_all)
        return self.model

    def __del__(self):
        self.detach(unpatch_all=False)

    # LoRAs of conditioning hooks.

    def register_all_hook_patches(self, hooks):
        self.restore_hook_patches()
        new = [hook for hook in hooks.hooks if hook.hook_ref not in self.hook_patches]
        if new:
            self.hook_patches_backup = {key: dict(value) for key, value in self.hook_patches.items()}
        for hook in new:
            hook.add_hook_patches(self, [])

    def restore_hook_patches(self):
        if self.hook_patches_backup is not None:
            self.hook_patches, self.hook_patches_backup = self.hook_patches_backup, None

    def apply_hooks(self, hooks):
        if self.current_hooks != hooks:
            self.patch_hooks(hooks)

    def patch_hooks(self, hooks):
        with self.use_ejected():
            self.current_hooks = hooks

    def unpatch_hooks(self):
        with self.use_ejected():
            self.current_hooks = None

    def clean_hooks(self):
        self.unpatch_hooks()

    def cleanup(self):
        self.clean_hooks()
