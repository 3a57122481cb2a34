"""Single layers of a real ComfyUI: loading, every way of running, LoRA, saving, torch.compile."""

import json

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor
from convrot_reference import error, int8_layer, load, nvfp4_layer, plain_error, same_entries, settings_tensor

pytestmark = pytest.mark.comfyui
MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "autograd": torch.enable_grad}


def linear(comfy, entries, shape, native=False, dtype=torch.float32):
    disabled = set() if native else {"nvfp4", "int8_tensorwise"}
    made = comfy.ops.mixed_precision_ops({}, dtype, disabled=disabled)
    layer = made.Linear(shape[1], shape[0], bias="bias" in entries)
    assert load(layer, entries) == ([], [])
    return layer


def test_every_hook_has_come_to_a_verdict(hook_states):
    assert hook_states["convrot"] == "applied"
    assert hook_states["convrot-int8"] in ("applied", "not-needed")
    assert hook_states["convrot-conv2d"] in ("applied", "incompatible")
    assert hook_states["convrot-bake"] in ("disabled", "applied")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("native", (True, False), ids=("quantized product", "full precision"))
@pytest.mark.parametrize("size", (4, 16, 64, 256, 1024))
@pytest.mark.parametrize("dims", (2, 3, 4))
def test_nvfp4_runs_with_the_error_of_a_plain_layer(comfy, nvfp4_product, dims, size, native, mode):
    weight, bias = torch.randn(48, 1024), torch.randn(48)
    x = torch.randn(*[40, 3, 2][:dims - 1], 1024)
    layer = linear(comfy, {**nvfp4_layer(weight, size), "bias": bias}, weight.shape, native)
    bound = (plain_error(weight) ** 2 + (plain_error(x.reshape(-1, 1024)) ** 2 if native else 0)) ** 0.5
    with MODES[mode]():
        assert error(layer(x), x @ weight.t() + bias) < 1.1 * bound


@pytest.mark.parametrize("native", (True, False), ids=("quantized product", "full precision"))
def test_training_through_a_layer_gives_the_gradient_of_its_values(comfy, nvfp4_product, native):
    if native and not hasattr(comfy.ops, "QuantLinearFunc"):
        pytest.skip("this ComfyUI does not train through quantized products")
    layer = linear(comfy, nvfp4_layer(torch.randn(96, 256), 64), (96, 256), native)
    x = torch.randn(2, 20, 256, requires_grad=True)
    layer(x).sum().backward()
    assert error(x.grad, (torch.ones(2, 20, 96) @ layer.weight.dequantize())) < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_int8_linear_keeps_running_as_comfyui_runs_it(comfy, formats, mode):
    if "int8" not in formats:
        pytest.skip("this ComfyUI loads no INT8 files")
    weight, x = torch.randn(96, 256), torch.randn(20, 256)
    layer = linear(comfy, int8_layer(weight, 64), weight.shape)
    with MODES[mode]():
        assert error(layer(x), x @ weight.t()) < 0.02


@pytest.mark.parametrize("kind", ("nvfp4", "int8"))
@pytest.mark.parametrize("seed", (0, 1234))
def test_lora_set_by_comfyui_s_own_methods_is_in_the_model_s_basis(comfy, formats, kind, seed):
    if kind not in formats:
        pytest.skip(f"this ComfyUI loads no {kind} files")
    weight, delta = torch.randn(96, 256), torch.randn(96, 4) @ torch.randn(4, 256) * 0.2
    entries = (nvfp4_layer if kind == "nvfp4" else int8_layer)(weight, 64)
    layer = linear(comfy, entries, weight.shape)
    before = layer.weight._layout_cls
    layer.set_weight(layer.convert_weight(layer.weight) + delta, seed=seed)
    assert layer.weight._layout_cls == before
    # Stochastic rounding has twice the noise of nearest rounding.
    bound = {"nvfp4": 0.14 if seed == 0 else 0.25, "int8": 0.02}[kind]
    assert error(layer.weight.dequantize(), weight + delta) < bound
    again = layer.set_weight(layer.weight.dequantize(), seed=seed, return_weight=True)
    assert error(again.dequantize(), weight + delta) < 2 * bound


@pytest.mark.parametrize("kind", ("nvfp4", "int8", "nvfp4 padded", "nvfp4 with input scale"))
def test_a_saved_layer_is_the_file_s_and_loads_to_the_same_layer(comfy, formats, kind):
    if kind.split()[0] not in formats:
        pytest.skip(f"this ComfyUI loads no {kind} files")
    weight = torch.randn(60 if "padded" in kind else 96, 256)
    entries = int8_layer(weight, 64) if kind == "int8" else nvfp4_layer(weight, 64)
    if "padded" in kind:
        entries = nvfp4_layer(weight, 64, orig_shape=[60, 256])
    if "input scale" in kind:
        entries["input_scale"] = torch.tensor(0.01)
    layer = linear(comfy, entries, weight.shape)
    assert same_entries(layer.state_dict(), entries)
    again = linear(comfy, layer.state_dict(), weight.shape)
    assert torch.equal(again.weight.dequantize(), layer.weight.dequantize())


def test_a_bank_of_experts_is_rotated_expert_by_expert(comfy):
    made = comfy.ops.mixed_precision_ops({}, torch.float32, disabled={"nvfp4"})
    if not hasattr(made, "MoEExperts"):
        pytest.skip("this ComfyUI has no banks of experts")
    weights, x = torch.randn(3, 96, 256), torch.randn(20, 256)
    experts = [nvfp4_layer(weight, 64) for weight in weights]
    entries = {key: torch.stack([expert[key] for expert in experts]) for key in experts[0] if key != "comfy_quant"}
    entries["comfy_quant"] = experts[0]["comfy_quant"]
    bank = made.MoEExperts(3, 256, 96, bias=False)
    load(bank, entries)
    for index, weight in enumerate(weights):
        assert error(bank.expert_linear(x, index), x @ weight.t()) < 0.12
    saved = bank.state_dict()
    again = made.MoEExperts(3, 256, 96, bias=False)
    load(again, saved)
    assert torch.equal(again.expert_linear(x, 1), bank.expert_linear(x, 1))


@pytest.mark.parametrize("settings", [
    {"params": {"convrot": True, "convrot_groupsize": 64}}, {"convrot": "true", "convrot_groupsize": "64"}])
def test_the_declaration_is_found_wherever_it_stands(comfy, settings):
    weight = torch.randn(96, 256)
    entries = {**nvfp4_layer(weight, 64), "comfy_quant": settings_tensor(format="nvfp4", **settings)}
    assert error(linear(comfy, entries, weight.shape).weight.dequantize(), weight) < 0.12
    twice = json.dumps(json.dumps({"format": "nvfp4", **settings})).encode()
    entries["comfy_quant"] = torch.tensor(list(twice), dtype=torch.uint8)
    assert error(linear(comfy, entries, weight.shape).weight.dequantize(), weight) < 0.12


def test_a_layer_built_from_the_packed_shape_takes_its_own(comfy):
    weight, x = torch.randn(60, 256), torch.randn(8, 256)
    layer = linear(comfy, nvfp4_layer(weight, 64, out_features=60, in_features=256), (64, 128))
    assert error(layer(x), x @ weight.t()) < 0.12


@pytest.mark.parametrize("backend", ("eager", "inductor"))
@pytest.mark.parametrize("native", (True, False), ids=("quantized product", "full precision"))
def test_torch_compile_breaks_no_graph_that_a_plain_layer_does_not_break(comfy, nvfp4_product, native, backend):
    weight, x = torch.randn(96, 256), torch.randn(2, 20, 256)
    plain = QuantizedTensor.from_float(weight, "TensorCoreNVFP4Layout").state_dict("weight")
    breaks = []
    for entries in (nvfp4_layer(weight, 64), {**plain, "comfy_quant": settings_tensor(format="nvfp4")}):
        layer = linear(comfy, entries, weight.shape, native)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with torch.no_grad():
            compiled = torch.compile(layer.forward, backend=backend)
            assert error(compiled(x), layer(x)) < 1e-5
        breaks.append(sum(torch._dynamo.utils.counters["graph_break"].values()))
    assert breaks[0] <= breaks[1]


def test_a_compiled_kernel_is_the_kernel(comfy, formats):
    if "kernel" not in formats:
        pytest.skip("this ComfyUI loads no INT8 convolutions")
    weight, image = torch.randn(24, 32, 3, 3), torch.randn(2, 32, 10, 10)
    layer = comfy.ops.mixed_precision_ops({}, torch.float32).Conv2d(32, 24, 3, bias=False)
    load(layer, int8_layer(weight, 16))
    with torch.no_grad():
        assert error(torch.compile(layer.forward, backend="aot_eager")(image), layer(image)) < 1e-5
        assert error(layer(image), torch.nn.functional.conv2d(image, weight)) < 0.02
