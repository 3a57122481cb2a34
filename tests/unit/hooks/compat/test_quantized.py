"""Repairs for weights that comfy-kitchen holds quantized.

``quant_copy``, ``quant_keys``, ``quant_parameter`` and ``disabled_list``.
"""

import copy
import sys
from types import ModuleType

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor


def _quantized(layout="TensorCoreFP8Layout"):
    return QuantizedTensor.from_float(torch.randn(32, 64), layout)


@pytest.fixture
def kitchen(monkeypatch):
    """The module that holds QuantizedTensor, as comfy-kitchen made it: qpatch, installed, has mended it already."""
    monkeypatch.delattr(QuantizedTensor, "__deepcopy__", raising=False)
    module = ModuleType("comfy_kitchen.tensor.base")
    module.QuantizedTensor = QuantizedTensor
    return module


def test_copying_a_quantized_weight_stops_in_comfy_kitchen(kitchen):
    with pytest.raises(RuntimeError, match="storage"):
        copy.deepcopy(_quantized())


@pytest.mark.parametrize("layout", ["TensorCoreFP8Layout", "TensorCoreNVFP4Layout"])
@pytest.mark.parametrize("wrap", [
    lambda tensor: tensor, lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
])
def test_a_copy_has_the_same_numbers_and_owns_them(kitchen, mend, layout, wrap):
    assert mend("quant_copy", kitchen).verdict == "needed"
    original = wrap(_quantized(layout))
    copied = copy.deepcopy(original)
    assert type(copied) is QuantizedTensor
    assert isinstance(copied, torch.nn.Parameter) is isinstance(original, torch.nn.Parameter)
    assert copied.requires_grad is False
    assert torch.equal(copied.dequantize(), original.dequantize())
    assert copied._qdata.data_ptr() != original._qdata.data_ptr()


def test_two_uses_of_one_weight_stay_one_weight_in_the_copy(kitchen, mend):
    mend("quant_copy", kitchen)
    weight = _quantized()
    first, second = copy.deepcopy([weight, weight])
    assert first is second


def test_a_layer_with_a_quantized_weight_can_be_copied(kitchen, mend):
    mend("quant_copy", kitchen)
    layer = torch.nn.Linear(64, 32, bias=False)
    layer.weight = torch.nn.Parameter(_quantized(), requires_grad=False)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied.weight.dequantize(), layer.weight.dequantize())


def test_a_class_that_copies_itself_is_left_alone(mend):
    module = ModuleType("comfy_kitchen.tensor.base")
    module.QuantizedTensor = type("QuantizedTensor", (torch.Tensor,), {"__deepcopy__": lambda self, memo: self})
    assert mend("quant_copy", module).verdict == "not-needed"


class Layer(torch.nn.Module):
    """Its weight stands in the state dict in two parts, as a quantized one does."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def state_dict(self, *args, destination=None, prefix="", **kwargs):
        found = {} if destination is None else destination
        found.update({prefix + "weight": self.weight, prefix + "weight_scale": torch.ones(())})
        return found


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.quantized, self.plain = Layer(), torch.nn.Linear(2, 2, bias=False)


def test_key_patches_stop_at_the_parts_of_a_quantized_weight(core):
    with pytest.raises(AttributeError, match="weight_scale"):
        core.patcher.ModelPatcher(Model()).get_key_patches()


def test_key_patches_list_each_weight_once(core, mend):
    assert mend("quant_keys", core.patcher).verdict == "needed"
    patcher = core.patcher.ModelPatcher(Model())
    patcher.patches["plain.weight"] = ["a patch"]
    found = patcher.get_key_patches()
    assert list(found) == ["quantized.weight", "plain.weight"]
    assert found["plain.weight"][1:] == ["a patch"]
    assert list(patcher.get_key_patches("plain.")) == ["plain.weight"]
    assert "model_state_dict" not in vars(patcher)


def test_an_attribute_that_is_missing_for_another_reason_is_still_an_error(core, mend):
    mend("quant_keys", core.patcher)
    patcher = core.patcher.ModelPatcher(torch.nn.Linear(2, 2))
    del patcher.patches
    with pytest.raises(AttributeError, match="patches"):
        patcher.get_key_patches()


def test_a_comfyui_that_looks_up_no_parts_is_left_alone(core, standin, mend):
    mended = standin("compat/model_patcher.py", "comfy.model_patcher",
                     ("            weight, _, convert", "            if key.endswith('_scale'):\n"
                      "                continue\n            weight, _, convert"))
    assert mend("quant_keys", mended).verdict == "not-needed"


def test_a_parameter_around_a_quantized_weight_is_recognised_today(core, mend):
    assert mend("quant_parameter", core.patcher).verdict == "not-needed"


class Hidden(torch.Tensor):
    """A quantized tensor of a build whose Parameter is not one itself."""

    @classmethod
    def from_float(cls, tensor, layout):
        return tensor.as_subclass(cls)


class HidingParameter(torch.nn.Parameter):
    def __new__(cls, data, requires_grad=False):
        made = torch.Tensor._make_subclass(cls, data.as_subclass(torch.Tensor), requires_grad)
        made.held = data
        return made

    data = property(lambda self: self.held)


def test_where_a_parameter_hides_it_the_quantized_weight_itself_is_given(core, mend, monkeypatch):
    monkeypatch.setattr(core.patcher, "QuantizedTensor", Hidden)
    monkeypatch.setattr(torch.nn, "Parameter", HidingParameter)
    assert mend("quant_parameter", core.patcher).verdict == "needed"
    weight = HidingParameter(Hidden.from_float(torch.ones(2), ""))
    holder = type("Holder", (), {"weight": weight, "bias": torch.ones(2)})()
    assert type(core.patcher.get_key_weight(holder, "weight")[0]) is Hidden
    assert core.patcher.get_key_weight(holder, "bias")[0] is holder.bias


def test_a_list_of_disabled_formats_is_taken_where_a_set_is_wanted(standin, mend):
    ops = standin("compat/mixed_ops.py", "comfy.ops")
    with pytest.raises(AttributeError, match="add"):
        ops.mixed_precision_ops(disabled=["nvfp4"])
    assert mend("disabled_list", ops).verdict == "needed"
    assert ops.mixed_precision_ops(disabled=["nvfp4"]) == ["mxfp8", "nvfp4"]
    assert ops.mixed_precision_ops({}, None, False, ["nvfp4"]) == ["mxfp8", "nvfp4"]
    mine = {"nvfp4"}
    ops.mixed_precision_ops(disabled=mine)
    assert mine == {"nvfp4"}, "the caller's set was changed"


def test_a_comfyui_that_takes_a_list_is_left_alone(standin, mend):
    ops = standin("compat/mixed_ops.py", "comfy.ops", ("    disabled.add(\"mxfp8\")\n", ""))
    assert mend("disabled_list", ops).verdict == "not-needed"


def test_a_release_before_mixed_precision_needs_no_repair(mend):
    assert mend("disabled_list", ModuleType("comfy.ops")).verdict == "not-needed"
    assert "comfy.ops" not in sys.modules
