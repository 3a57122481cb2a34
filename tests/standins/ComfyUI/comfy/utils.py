"""Stand-in for comfy.utils: reading files, and reaching into a model by a dotted name."""

import torch
from safetensors import safe_open


def load_torch_file(ckpt, safe_load=False, device=None, return_metadata=False):
    with safe_open(ckpt, framework="pt", device="cpu") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
        return (tensors, file.metadata()) if return_metadata else tensors


def get_attr(obj, dotted):
    for name in dotted.split("."):
        obj = getattr(obj, name)
    return obj


def set_attr(obj, dotted, value):
    owner, _, name = dotted.rpartition(".")
    owner = get_attr(obj, owner) if owner else obj
    before = getattr(owner, name)
    setattr(owner, name, value)
    return before


def set_attr_param(obj, dotted, value):
    return set_attr(obj, dotted, torch.nn.Parameter(value, requires_grad=False))


class ProgressBar:
    seen = []

    def __init__(self, total):
        self.total, self.current = total, 0

    def update_absolute(self, value, total=None, preview=None):
        self.current, self.total = value, total or self.total
        ProgressBar.seen.append((self.current, self.total))
