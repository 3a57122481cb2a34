"""Reference arithmetic that owes nothing to the code under test, and layers as ConvRot files have them.

Shared by the unit tests, the contract tests and the benchmark.
"""

import json

import numpy
import torch
from comfy_kitchen.tensor import QuantizedTensor

from qpatch import patching

FOUR = numpy.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=numpy.float64)


def reference_matrix(size):
    """The regular Hadamard matrix by its definition: Kronecker powers in float64."""
    matrix = FOUR
    while len(matrix) < size:
        matrix = numpy.kron(matrix, FOUR)
    return torch.from_numpy(matrix / size ** 0.5)


def rotated(x, size, axis=-1):
    """``x`` rotated along ``axis`` in float64, one group at a time."""
    moved = x.double().movedim(axis, -1)
    groups = [group @ reference_matrix(size) for group in moved.split(size, dim=-1)]
    return torch.cat(groups, dim=-1).movedim(-1, axis)


def error(found, wanted):
    """Relative error in the Frobenius norm, in float64."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def settings_tensor(**settings):
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


def nvfp4_layer(weight, group_size, **settings):
    """The entries of an NVFP4 ConvRot layer of a file, for a float weight [out, in]."""
    stored = QuantizedTensor.from_float(rotated(weight, group_size).float(), "TensorCoreNVFP4Layout")
    settings = {"convrot": True, "convrot_groupsize": group_size, **settings}
    return {**stored.state_dict("weight"), "comfy_quant": settings_tensor(format="nvfp4", **settings)}


def plain_error(weight):
    """What NVFP4 costs a float weight that is not rotated: the measure of what a rotated one may cost."""
    return error(QuantizedTensor.from_float(weight, "TensorCoreNVFP4Layout").dequantize(), weight)


def int8_layer(weight, group_size):
    """The entries of an INT8 ConvRot layer, matrix or convolution: one scale per row, plain rounding."""
    stored = rotated(weight, group_size, axis=1).float()
    scale = stored.abs().amax(dim=tuple(range(1, stored.dim())), keepdim=True) / 127
    return {
        "weight": (stored / scale).round().to(torch.int8), "weight_scale": scale,
        "comfy_quant": settings_tensor(format="int8_tensorwise", convrot=True, convrot_groupsize=group_size),
    }


def load(layer, entries):
    """Load ``entries`` into ``layer`` as torch would; what it reports missing and unexpected."""
    missing, unexpected = [], []
    layer._load_from_state_dict(dict(entries), "", {}, True, missing, unexpected, [])
    return missing, unexpected


def same_entries(found, wanted):
    """Whether two state dicts hold the same keys and bits; their configurations the same settings."""
    if found.keys() != wanted.keys():
        return False
    for key, value in found.items():
        other = wanted[key]
        if key.endswith("comfy_quant"):
            if json.loads(bytes(value.tolist())) != json.loads(bytes(other.tolist())):
                return False
        elif value.dtype != other.dtype or value.shape != other.shape or not torch.equal(bits(value), bits(other)):
            return False
    return True


def bits(tensor):
    """The bytes of ``tensor``; float8 has no equality of its own everywhere."""
    return torch.atleast_1d(tensor.detach()).contiguous().view(torch.uint8)


def put(hook, module, name):
    """Put the patches of ``hook`` on ``module`` as the engine does; they are returned, to be taken back."""
    found = list(hook.patches(module))
    for patch in found:
        patch.by = name
    patching.put(found)
    return found
