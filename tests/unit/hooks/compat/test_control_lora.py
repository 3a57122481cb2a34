"""Repair ``control_lora``: what a Control-LoRA borrows from a model with quantized weights."""

from types import SimpleNamespace

import pytest
import torch

kitchen = pytest.importorskip("comfy_kitchen.tensor")

from qpatch.hooks.quant_lora import branch
from qpatch.hooks.quant_lora.pair import Pair

SIZE = 32


class Quantized(torch.nn.Linear):
    """A layer of ComfyUI's: in the state dict its weight is what is stored."""

    def __init__(self, layout):
        super().__init__(SIZE, SIZE, bias=False)
        weight = kitchen.QuantizedTensor.from_float(torch.randn(SIZE, SIZE), layout)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def state_dict(self, *, destination, prefix, keep_vars=False):
        destination[f"{prefix}weight"] = self.weight._qdata
        return destination


def model(layout):
    torch.manual_seed(0)
    layers = {"shared": Quantized(layout), "own": Quantized(layout), "plain": torch.nn.Linear(4, 4, bias=False),
              "decoder": Quantized(layout)}
    return SimpleNamespace(diffusion_model=torch.nn.ModuleDict(layers))


@pytest.fixture
def module(standin):
    return standin("compat/controlnet.py", "comfy.controlnet")


def borrowed(module, lender):
    own = {"own.weight": torch.full((SIZE, SIZE), 7.0)}
    control = module.ControlLora(own, ("shared", "own", "plain"))
    control.pre_run(lender, None)
    return control.control_model


@pytest.mark.parametrize("layout", ("TensorWiseINT8Layout", "TensorCoreNVFP4Layout"))
def test_it_borrows_the_numbers_of_quantized_weights_and_keeps_its_own(module, mend, layout):
    lender = model(layout)
    assert not borrowed(module, lender).shared.weight.is_floating_point()
    assert mend("control_lora", module).verdict == "needed"
    found, layers = borrowed(module, lender), lender.diffusion_model
    assert torch.equal(found.shared.weight, layers["shared"].weight.dequantize())
    assert torch.equal(found.plain.weight, layers["plain"].weight) and found.own.weight.eq(7.0).all()
    assert not hasattr(found, "decoder")


def test_a_lora_that_runs_beside_a_weight_is_borrowed_with_it(module, mend):
    mend("control_lora", module)
    lender, (down, up) = model("TensorWiseINT8Layout"), (torch.randn(2, SIZE), torch.randn(SIZE, 2))
    layer = lender.diffusion_model["shared"]
    branch.put(layer, fixed=Pair(down, up))
    wanted = layer.weight.dequantize() + up @ down
    torch.testing.assert_close(borrowed(module, lender).shared.weight, wanted)


def test_one_that_dequantizes_by_itself_or_borrows_in_another_way_is_left_alone(module, mend):
    def dequantizing(self, model, percent):
        for key, weight in model.state_dict().items():
            module.comfy.utils.set_attr_param(self, key, weight.dequantize())

    module.ControlLora.pre_run = dequantizing
    assert mend("control_lora", module).verdict == "not-needed"
    module.ControlLora.pre_run = lambda self, model, percent: None
    assert mend("control_lora", module).verdict == "incompatible"
