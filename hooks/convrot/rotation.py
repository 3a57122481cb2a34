"""The ConvRot rotation: multiplying by a block-diagonal regular Hadamard matrix.

The matrix of group size n is a Kronecker power of the symmetric 4 x 4 matrix
[[1,1,1,-1],[1,1,-1,1],[1,-1,1,1],[-1,1,1,1]], over sqrt(n). It is symmetric and orthogonal, hence
its own inverse: one function rotates and un-rotates.

Rotating is a dense product with the small matrix. Measured on a CPU (tests/benchmarks/convrot.py),
that beats butterflies at every size, and two smaller products at every size but one: 1024 in float32,
where 16 x 64 takes 0.4 of the time. In bfloat16 two products cost a second rounding and little is gained.

:func:`rotate` is a torch operator of its own (``qpatch::convrot_rotate``), so that torch.compile sees
one node instead of the cache below, and a traced run cannot leave a fake matrix in it.
"""

from __future__ import annotations

import math
from threading import Lock

import torch

#: The group sizes that have a regular Hadamard matrix and occur in files: powers of 4.
GROUP_SIZES = (4, 16, 64, 256, 1024)
#: Along an inner axis: from this many elements after it on, H @ [..., group, rows] beats moving the axis.
#: Images have them (a 64 x 64 activation: 1.8 ms against 9.4), 3 x 3 kernels do not.
_LONG_ROWS = 64
_TWO_STAGES = {(1024, torch.float32): (16, 64), (1024, torch.float64): (16, 64)}

#: (size, device, dtype) -> matrix. 256 x 256 in float32 is 256 KiB; a process that needs more of them than a
#: handful (the sizes of a model, two dtypes, the devices in use) rebuilds the oldest.
_matrices: dict[tuple, torch.Tensor] = {}
_MATRICES_KEPT = 24
_building = Lock()


def hadamard(size: int, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
    """The normalized regular Hadamard matrix, [size, size], cached; not to be written to.

    Its entries are +-1/sqrt(size), powers of two, hence exact in every float type. It is computed on
    ``device`` itself from bit patterns: no copy from the host, not even the first time.
    ValueError for a size that is not in GROUP_SIZES.
    """
    key = (size, torch.device(device), dtype)
    matrix = _matrices.get(key)
    # A purge that empties every tensor it can find leaves the object here without its storage.
    if matrix is None or matrix.untyped_storage().nbytes() == 0:
        with _building:
            matrix = _matrices[key] = _build(size, torch.device(device)).to(dtype)
            while len(_matrices) > _MATRICES_KEPT:
                del _matrices[next(iter(_matrices))]
    return matrix


def _build(size: int, device: torch.device) -> torch.Tensor:
    if size not in GROUP_SIZES:
        raise ValueError(f"ConvRot group size {size}: expected one of {', '.join(map(str, GROUP_SIZES))}")
    # Outside inference mode, or the cached matrix could not take part in autograd later.
    with torch.inference_mode(False), torch.no_grad():
        index = torch.arange(size, device=device)
        different = index[:, None] ^ index[None, :]
        # A factor of -1 for each base-4 digit in which row and column are complements (their xor is 3).
        complements = different & (different >> 1)
        matrix = torch.full((size, size), size ** -0.5, device=device)
        for shift in range(0, size.bit_length() - 1, 2):
            matrix *= 1 - 2 * ((complements >> shift) & 1)
        return matrix


def rotate(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """``x`` with each run of ``group_size`` elements of its last axis multiplied by the matrix.

    x: [..., features], any float dtype; the result has its shape and dtype. Differentiable.
    ValueError when ``group_size`` does not divide the last axis, or is not in GROUP_SIZES.
    """
    return _apply(x, group_size, x.dim() - 1)


def rotate_channels(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """The same along axis 1: ``x`` is [batch, channels, ...], or a convolution's [out, in, ...] weight."""
    if x.is_contiguous() and math.prod(x.shape[2:]) >= _LONG_ROWS:
        return _apply(x, group_size, 1)
    return rotate(x.movedim(1, -1), group_size).movedim(-1, 1)


def _apply(x: torch.Tensor, group_size: int, dim: int) -> torch.Tensor:
    if type(x) is torch.Tensor and not torch.compiler.is_compiling():
        # A real tensor: without the dispatcher's way through a Python operator, 1 to 5 us of it.
        return _rotate(x, group_size, dim)
    return torch.ops.qpatch.convrot_rotate(x, group_size, dim)


def _rotate(x: torch.Tensor, group_size: int, dim: int) -> torch.Tensor:
    if x.shape[dim] % group_size:
        raise ValueError(f"ConvRot group size {group_size} does not divide {x.shape[dim]} features")
    if dim < x.dim() - 1:
        rows = x.reshape(-1, group_size, math.prod(x.shape[dim + 1:]))
        return (hadamard(group_size, x.device, x.dtype) @ rows).reshape(x.shape)
    stages = _TWO_STAGES.get((group_size, x.dtype))
    if stages is None:
        return (x.reshape(-1, group_size) @ hadamard(group_size, x.device, x.dtype)).reshape(x.shape)
    rows, columns = (hadamard(size, x.device, x.dtype) for size in stages)
    return (rows @ (x.reshape(-1, *stages) @ columns)).reshape(x.shape)


def _same_shape(x: torch.Tensor, group_size: int, dim: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def _keep_arguments(ctx, inputs, output) -> None:
    ctx.arguments = inputs[1:]


def _rotate_gradient(ctx, gradient):
    # The matrix is symmetric: its transpose, which the gradient needs, is the rotation itself.
    return torch.ops.qpatch.convrot_rotate(gradient, *ctx.arguments), None, None


def _define_operator() -> torch.library.Library | None:
    if hasattr(torch.ops.qpatch, "convrot_rotate"):
        return None
    library = torch.library.Library("qpatch", "FRAGMENT")
    library.define("convrot_rotate(Tensor x, int group_size, int dim) -> Tensor")
    library.impl("convrot_rotate", _rotate, "CompositeExplicitAutograd")
    torch.library.register_fake("qpatch::convrot_rotate", _same_shape, lib=library)
    torch.library.register_autograd(
        "qpatch::convrot_rotate", _rotate_gradient, setup_context=_keep_arguments, lib=library)
    return library


# The operator lives as long as its library object.
_library = _define_operator()
