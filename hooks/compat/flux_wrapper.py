"""Hook ``comfy-compat-flux-wrapper``: what others look for on a Nunchaku FLUX model is found through its wrapper.

ComfyUI-nunchaku wraps the model, and nodes that ask the diffusion model for ``patch_size``, ``img_in``
or the like get an AttributeError. What the wrapper lacks is looked up on the model inside, then in its
configuration. What is in neither is still missing: nothing is invented.
"""

import torch

from . import Repair, Spot


def _hides_the_model(original, module):
    wrapper = module.ComfyFluxWrapper.__new__(module.ComfyFluxWrapper)
    torch.nn.Module.__init__(wrapper)
    wrapper.model = torch.nn.Module()
    wrapper.model.qpatch_probe = True
    return None if hasattr(wrapper, "qpatch_probe") else "it hides the attributes of the model inside"


def _look_inside(original, module):
    def __getattr__(self, name):
        try:
            return original(self, name)
        except AttributeError:
            inside, config = self._modules.get("model"), vars(self).get("config")
            if inside is not None and hasattr(inside, name):
                return getattr(inside, name)
            if isinstance(config, dict) and name in config:
                return config[name]
            raise
    return __getattr__


def _set_inside(original, module):
    def __setattr__(self, name, value):
        inside = vars(self).get("_modules", {}).get("model")
        layers = () if inside is None else (*inside._modules, *inside._parameters)
        of_the_model = name in layers and name not in self._modules
        return setattr(inside, name, value) if of_the_model else original(self, name, value)
    return __setattr__


REPAIR = Repair(
    Spot("ComfyFluxWrapper.__getattr__", _hides_the_model, _look_inside),
    Spot("ComfyFluxWrapper.__setattr__", _hides_the_model, _set_inside),
    fine="the wrapper shows the attributes of the model inside",
)
examine, patches = REPAIR.examine, REPAIR.patches
