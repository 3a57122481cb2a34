"""What a lent Linear is, and that the one it stands for does not notice."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qpatch.hooks.lazy_lend import lazy, lend, twin
from qpatch.hooks.lazy_probe import UnfilledLinear


def attributes(module):
    """Everything that an object consists of, one level into its dicts."""
    return {
        name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()
    }


@given(
    st.integers(1, 5000), st.integers(1, 5000), st.booleans(),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn]),
)
def test_a_lent_linear_has_the_shape_and_dtype_of_a_full_one_and_owns_one_element(inputs, outputs, bias, dtype):
    source = UnfilledLinear(bias=bias, dtype=dtype)
    source.in_features, source.out_features = inputs, outputs
    lent = lend(source)
    assert lent.weight.shape == (outputs, inputs)
    assert (lent.bias is not None) == bias
    for tensor in lent.parameters():
        assert tensor.dtype == dtype and tensor.device.type == "cpu" and not tensor.requires_grad
        assert tensor.untyped_storage().nbytes() == dtype.itemsize
    assert not bias or lent.bias.shape == (outputs,)
    assert isinstance(lent, UnfilledLinear) and isinstance(lent.weight, torch.nn.Parameter)


def test_lending_changes_nothing_of_the_source(comfy):
    source = comfy.linear(64, 32, bias=True, dtype=torch.bfloat16)
    before = attributes(source)
    lent = lend(source)
    lent.register_buffer("note", torch.zeros(1))
    lent.register_forward_hook(lambda *unused: None)
    lent.extra = 1
    assert attributes(source) == before
    assert source.weight is None and source.bias is None and list(source.parameters()) == []


def test_what_the_caller_asks_for_comes_before_what_the_linear_declares(comfy):
    source = comfy.linear(64, 32, dtype=torch.bfloat16)
    assert lend(source, torch.float16).weight.dtype == torch.float16
    assert lend(source).weight.dtype == torch.bfloat16
    assert lend(source, device="meta").weight.device.type == "meta"


def test_a_device_that_is_asked_for_by_number_is_not_taken_for_none(comfy):
    if torch.cuda.is_available():
        assert lend(comfy.linear(64, 32, dtype=torch.bfloat16), device=0).weight.device.index == 0
    else:
        with pytest.raises((RuntimeError, AssertionError)):
            lend(comfy.linear(64, 32, dtype=torch.bfloat16), device=0)


def test_a_linear_that_holds_a_tensor_decides_on_the_device(comfy):
    with_bias = comfy.linear(64, 32, dtype=torch.bfloat16)
    with_bias.bias = torch.nn.Parameter(torch.zeros(32, device="meta"))
    assert lend(with_bias).weight.device.type == "meta"
    assert lend(with_bias).bias is with_bias.bias
    with_buffer = comfy.linear(64, 32, dtype=torch.bfloat16)
    with_buffer.register_buffer("scale", torch.zeros(1, device="meta"))
    assert lend(with_buffer).weight.device.type == "meta"


def test_without_any_dtype_the_error_names_the_layer_and_the_remedy(comfy):
    with pytest.raises(TypeError, match=r"manual_cast\.Linear\(in_features=64, out_features=32\).*torch_dtype="):
        lend(comfy.linear(64, 32))


@pytest.mark.parametrize("make", [
    lambda comfy: torch.nn.Linear(4, 4),
    lambda comfy: comfy.linear(4, 4, lazy=False),
    lambda comfy: torch.nn.LayerNorm(4, elementwise_affine=False),
    lambda comfy: None,
    lambda comfy: "linear",
])
def test_what_is_not_a_lazy_linear_is_handed_on_as_the_same_object(comfy, make):
    thing = make(comfy)
    assert not lazy(thing) and lend(thing) is thing


def test_a_twin_of_a_twin_is_lent_once(comfy):
    lent = lend(comfy.linear(64, 32, dtype=torch.bfloat16))
    assert lend(lent) is lent


def test_a_twin_takes_children_of_its_own(comfy):
    parent = torch.nn.Sequential(comfy.linear(4, 4))
    other = twin(parent)
    other[0] = torch.nn.Identity()
    assert not isinstance(parent[0], torch.nn.Identity)
