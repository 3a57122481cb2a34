"""Hook quant-lora: what LoRAs do to the output of a whole model (a stand-in of Z-Image), against the float model."""

import copy

import pytest
import torch

kitchen = pytest.importorskip("comfy_kitchen.tensor")

FORMATS = {
    "nvfp4": ("TensorCoreNVFP4Layout", {}),
    "fp8": ("TensorCoreFP8Layout", {"scale": "recalculate"}),
    "int8 convrot": ("TensorWiseINT8Layout", {"per_channel": True, "convrot": True}),
    "convrot w4a4": ("TensorCoreConvRotW4A4Layout", {}),
    "w4a8": ("AsymW4A8Int8Layout", {}),
}


@pytest.fixture(params=FORMATS)
def pair(request, comfy, standin):
    """(model whose block matrices are quantized, the same numbers in float32, their names)"""
    layout, settings = FORMATS[request.param]
    if not hasattr(kitchen, layout):
        pytest.skip(f"this comfy_kitchen has no {layout}")
    lumina = standin("ComfyUI/comfy/ldm/lumina/model.py", "comfy.ldm.lumina.model")
    plain = lumina.NextDiT(dim=256, n_heads=2, n_layers=1, cap_feat_dim=96, ffn_dim_multiplier=1.0, operations=torch.nn)
    quantized = copy.deepcopy(plain.requires_grad_(False))
    names = [name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear) and "layers" in name]
    for name in names:
        layer = plain.get_submodule(name)
        weight = kitchen.QuantizedTensor.from_float(layer.weight.data, layout, **settings)
        layer.weight.data = weight.dequantize().float()
        owner, _, attribute = name.rpartition(".")
        setattr(quantized.get_submodule(owner), attribute, comfy.Linear(weight, layer.bias))
    return quantized, plain, names


def test_effect_of_three_loras_is_theirs_on_the_output_of_the_model(pair, comfy):
    quantized, plain, names = pair
    x = torch.randn(1, 16, 4, 4), torch.tensor([0.6]), torch.randn(1, 5, 96)

    def effect(patcher, changes):
        """(the LoRA's on the quantized model, that of ``changes`` on the float model)"""
        patcher.partially_load(patcher.load_device, 1e32)
        for name in names:
            # Formats that quantize the activation too have a noise of their own; so the product is taken in float.
            quantized.get_submodule(name).weight_function = [lambda weight: weight]
        twin = copy.deepcopy(plain)
        for name, change in changes.items():
            twin.get_submodule(name).weight.data = (plain.get_submodule(name).weight + change).float()
        return quantized(*x).double(), twin(*x).double()

    patcher = comfy.ModelPatcher(quantized)
    base, wanted_base = effect(patcher, {})
    for rank, size, strength in ((1, 0.001, 0.1), (16, 0.05, 1.0), (128, 0.3, 2.0)):
        clone, changes = patcher.clone(), dict.fromkeys(names, 0)
        for name in [name for name in names for _ in range(3)]:
            weight = plain.get_submodule(name).weight.double()
            up, down = torch.randn(len(weight), rank).double(), torch.randn(rank, weight.shape[1]).double()
            up *= size * weight.square().mean().sqrt() / (up @ down).square().mean().sqrt()
            one = comfy.Adapter("lora", up.float(), down.float(), None, None, None, None)
            clone.add_patches({f"{name}.weight": one}, strength)
            changes[name] = changes[name] + strength * (up @ down)
        output, wanted = effect(clone, changes)
        found, wanted = (output - base).flatten(), (wanted - wanted_base).flatten()
        assert found @ wanted / (found.norm() * wanted.norm()) > 0.99 and abs(found.norm() / wanted.norm() - 1) < 0.01
    assert torch.equal(effect(patcher, {})[0], base)
