"""Stand-in for comfy.controlnet: a Control-LoRA borrows the weights of its model as the state dict has them."""

import types

import torch


def set_attr_param(obj, attr, value):
    *path, name = attr.split(".")
    for part in path:
        obj = getattr(obj, part)
    getattr(obj, name)
    setattr(obj, name, torch.nn.Parameter(value, requires_grad=False))


comfy = types.SimpleNamespace(utils=types.SimpleNamespace(set_attr_param=set_attr_param))


class ControlLora:
    """``control_weights``: its own; ``layers``: the names of the layers that it copies."""

    def __init__(self, control_weights, layers):
        self.control_weights, self.layers, self.control_model = control_weights, layers, None

    def pre_run(self, model, percent_to_timestep_function):
        self.control_model = torch.nn.Module()
        for name in self.layers:
            setattr(self.control_model, name, torch.nn.Linear(1, 1, bias=False))
        for key, weight in model.diffusion_model.state_dict().items():
            try:
                comfy.utils.set_attr_param(self.control_model, key, weight)
            except Exception:
                pass
        for key, weight in self.control_weights.items():
            comfy.utils.set_attr_param(self.control_model, key, weight)
