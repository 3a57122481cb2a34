"""Hook ``comfy-compat-qwen-moves``: Nunchaku Qwen-Image moves when ComfyUI asks for it, and ComfyUI knows of it.

ComfyUI-nunchaku's override of ``detach`` ignores ``unpatch_all=False``, which means "forget this
patcher, the model stays". ComfyUI says that to the old handle of a model whenever it loads the model,
and to a clone that is garbage collected: the whole model goes to the CPU and back before each sampling.
Its override of ``load`` records nothing: ComfyUI counts zero bytes of the model in VRAM, frees that much
again for it each time (other models go), and callbacks that wait for a load or a detach never run. The
records are made here as ComfyUI's own methods make them. A model that nunchaku itself offloads block by
block is not counted.
"""

import sys

from qpatch.layers import layers

from . import Repair, Spot


def _silent(original, module):
    names = {name for layer in layers(original) for name in layer.__code__.co_names}
    records = names & {"model_loaded_weight_memory", "super"}
    return None if records else f"{original.__name__} does not record what it moves"


def _record(model, *, device, size, patches):
    model.device = device
    model.model_loaded_weight_memory = size
    model.current_weight_patches_uuid = patches
    model.model_lowvram = False


def _recording_load(original, module):
    callbacks = sys.modules["comfy.patcher_extension"].CallbacksMP

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        result = original(self, device_to, lowvram_model_memory, force_patch_weights, full_load)
        if not getattr(self.model.diffusion_model, "offload", False):
            _record(self.model, device=device_to, size=self.model_size(), patches=self.patches_uuid)
        for callback in self.get_all_callbacks(callbacks.ON_LOAD):
            callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)
        return result
    return load


def _recording_detach(original, module):
    callbacks = sys.modules["comfy.patcher_extension"].CallbacksMP
    cls = module.NunchakuModelPatcher
    base = next(vars(parent)["detach"] for parent in cls.__mro__[1:] if "detach" in vars(parent))

    def detach(self, unpatch_all=True):
        if not unpatch_all:
            return base(self, unpatch_all=False)
        original(self, unpatch_all)
        _record(self.model, device=self.offload_device, size=0, patches=None)
        for callback in self.get_all_callbacks(callbacks.ON_DETACH):
            callback(self, unpatch_all)
        return self.model
    return detach


REPAIR = Repair(
    Spot("NunchakuModelPatcher.load", _silent, _recording_load),
    Spot("NunchakuModelPatcher.detach", _silent, _recording_detach),
    fine="loads and detaches are recorded",
)
examine, patches = REPAIR.examine, REPAIR.patches
