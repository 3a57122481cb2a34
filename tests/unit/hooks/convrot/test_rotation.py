"""The rotation against its definition, in float64, and what it promises about memory and compilation."""

import pytest
import torch
from convrot_reference import error, reference_matrix, rotated
from torch.utils._python_dispatch import TorchDispatchMode

from qpatch.hooks.convrot import rotation


@pytest.mark.parametrize("size", rotation.GROUP_SIZES)
def test_the_matrix_is_the_kronecker_power_of_its_definition(size):
    matrix = rotation.hadamard(size, "cpu", torch.float64)
    assert torch.equal(matrix, reference_matrix(size))
    assert torch.equal(matrix, matrix.t())
    assert torch.allclose(matrix @ matrix, torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("size", rotation.GROUP_SIZES)
def test_the_entries_are_exact_in_every_dtype(size, dtype):
    assert torch.equal(rotation.hadamard(size, "cpu", dtype).double(), reference_matrix(size))


def test_it_is_comfy_kitchen_s_matrix():
    utilities = pytest.importorskip("comfy_kitchen.tensor.int8_utils")
    for size in rotation.GROUP_SIZES:
        assert torch.equal(rotation.hadamard(size, "cpu", torch.float32), utilities._build_hadamard(size))


@pytest.mark.parametrize("size", rotation.GROUP_SIZES)
@pytest.mark.parametrize("shape", [(2048,), (3, 1024), (2, 5, 1024), (0, 1024)])
def test_each_group_of_the_last_axis_is_multiplied(shape, size):
    x = torch.randn(shape)
    found = rotation.rotate(x, size)
    assert found.shape == x.shape and found.dtype == x.dtype
    assert torch.allclose(found.double(), rotated(x, size), atol=1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [
    (torch.float64, 1e-14), (torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("size", (4, 256, 1024))
def test_rotating_twice_gives_the_input_back(size, dtype, bound):
    x = torch.randn(8, 2048).to(dtype)
    assert error(rotation.rotate(rotation.rotate(x, size), size), x) < bound


@pytest.mark.parametrize("shape", [(2, 64, 3, 3), (2, 64, 16, 16), (4, 64), (2, 64, 7)])
def test_the_channels_of_an_image_or_a_kernel_are_rotated(shape):
    x = torch.randn(shape)
    assert torch.allclose(rotation.rotate_channels(x, 16).double(), rotated(x, 16, axis=1), atol=1e-5)


def test_the_memory_format_of_an_image_does_not_matter():
    x = torch.randn(2, 64, 16, 16).contiguous(memory_format=torch.channels_last)
    assert torch.allclose(rotation.rotate_channels(x, 16).double(), rotated(x, 16, axis=1), atol=1e-5)


@pytest.mark.parametrize("size", (1, 2, 8, 32, 128, 4096))
def test_a_size_without_a_regular_matrix_is_refused(size):
    with pytest.raises(ValueError, match=f"group size {size}"):
        rotation.rotate(torch.zeros(1, 4096 * 2), size)


def test_features_that_no_group_divides_are_refused():
    with pytest.raises(ValueError, match="16 does not divide 40"):
        rotation.rotate(torch.zeros(1, 40), 16)


def test_the_gradient_is_rotated_too():
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: rotation.rotate(a, 4), (x,))
    # The way of tensors that are not plain ones: through the operator.
    assert torch.autograd.gradcheck(lambda a: torch.ops.qpatch.convrot_rotate(a, 4, 1), (x,))


def test_the_matrices_are_kept_and_their_number_is_bounded():
    first = rotation.hadamard(16, "cpu", torch.float32)
    assert rotation.hadamard(16, "cpu", torch.float32) is first
    for index in range(rotation._MATRICES_KEPT + 5):
        rotation.hadamard(4, f"meta:{index}", torch.float32)
    assert len(rotation._matrices) <= rotation._MATRICES_KEPT
    assert torch.equal(rotation.hadamard(16, "cpu", torch.float32), first)


def test_a_matrix_that_a_purge_has_emptied_is_built_anew():
    matrix = rotation.hadamard(64, "cpu", torch.float32)
    matrix.data = torch.empty(0)
    assert torch.equal(rotation.hadamard(64, "cpu", torch.float32).double(), reference_matrix(64))
    matrix = rotation.hadamard(64, "cpu", torch.float32)
    matrix.untyped_storage().resize_(0)
    assert torch.equal(rotation.hadamard(64, "cpu", torch.float32).double(), reference_matrix(64))


class Devices(TorchDispatchMode):
    """Notes the devices of all tensors that come out of operators."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim():
            self.seen.add(result.device.type)
        return result


def test_the_matrix_is_made_on_its_device_without_a_copy_from_the_host():
    with Devices() as devices:
        rotation._build(256, torch.device("meta"))
    assert devices.seen == {"meta"}


def test_torch_compile_sees_one_graph_and_leaves_no_fake_matrix_behind():
    rotation._matrices.clear()
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module

    compiled = torch.compile(lambda x: rotation.rotate(x * 2, 256) + 1, backend=backend, fullgraph=True)
    x = torch.randn(4, 512)
    assert torch.allclose(compiled(x), rotation.rotate(x * 2, 256) + 1)
    assert len(graphs) == 1
    assert all(type(matrix) is torch.Tensor for matrix in rotation._matrices.values())
