"""Stand-in: the platform flag that the lazy Linear of older releases needs as well."""

import torch

WINDOWS = False


def get_torch_device():
    return torch.device("cpu")
