"""Hook ``convrot-bake`` on a stand-in of comfy.model_patcher: once at load, exactly undone, invisible to who asks."""

import importlib.util
from pathlib import Path

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor
from convrot_reference import error, put

from qpatch import patching
from qpatch.finding import INCOMPATIBLE, NEEDED
from qpatch.hooks.convrot import bake, baking, config, layouts, rotation


@pytest.fixture
def model_patcher():
    path = Path(__file__).parent / "standin_model_patcher.py"
    spec = importlib.util.spec_from_file_location("convrot_standin_model_patcher", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    put(bake, module, "convrot-bake")
    return module


def nvfp4(weight):
    return QuantizedTensor.from_float(weight, layouts.rotated(config.NVFP4_LAYOUT, 64))


class Layer(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)


@pytest.fixture
def model():
    """``a`` and ``b`` rotated, ``plain`` quantized but not rotated, ``float`` neither."""
    made = torch.nn.Module()
    made.a, made.b = Layer(nvfp4(torch.randn(96, 256))), Layer(nvfp4(torch.randn(64, 256)))
    made.plain = Layer(QuantizedTensor.from_float(torch.randn(64, 256), config.NVFP4_LAYOUT))
    made.unquantized = Layer(torch.randn(64, 256))
    return made


def lora(model_patcher, out, rank=4, alpha=8.0):
    return model_patcher.LoRAAdapter(torch.randn(out, rank), torch.randn(rank, 256), alpha, None, None, None)


def test_a_rotated_weight_is_baked_once_and_no_other_is(model_patcher, model):
    patcher = model_patcher.ModelPatcherDynamic(model)
    patcher.add_patches({f"{name}.weight": lora(model_patcher, 64) for name in ("b", "plain", "unquantized")}, 0.5)
    wanted = model.b.weight.dequantize() + 0.5 * patcher.patches["b.weight"][0][1].delta()
    patcher.load()
    assert model.b.weight_lowvram_function is None
    assert model.plain.weight_lowvram_function is not None and model.unquantized.weight_lowvram_function is not None
    assert model.b.weight._layout_cls == "TensorCoreNVFP4LayoutConvRot64"
    assert error(model_patcher.cast(model.b), wanted) < 0.15
    baked = model.b.weight
    patcher.load()
    assert model.b.weight is baked and model.b.weight_lowvram_function is None


def test_the_model_s_copies_on_the_device_and_in_pinned_memory_are_dropped_when_a_weight_changes(model_patcher, model):
    patcher = model_patcher.ModelPatcherDynamic(model)
    patcher.add_patches({"a.weight": lora(model_patcher, 96)})
    model.a._v_signature = 5
    patcher.load()
    assert model.a._v_signature is None and patcher.pins_dropped == 1
    patcher.load()
    assert patcher.pins_dropped == 1


def test_switching_loras_and_unloading_puts_the_same_object_back(model_patcher, model):
    original = model.a.weight, model.b.weight
    base = model_patcher.ModelPatcherDynamic(model)
    first, second = base.clone(), base.clone()
    first.add_patches({"a.weight": lora(model_patcher, 96)})
    second.add_patches({"b.weight": lora(model_patcher, 64)})
    for _ in range(10):
        first.load()
        assert model.a.weight is not original[0] and model.b.weight is original[1]
        second.load()
        assert model.a.weight is original[0] and model.b.weight is not original[1]
        base.load()
        assert (model.a.weight, model.b.weight) == original
    first.load()
    first.unpatch_model(unpatch_weights=False)
    assert model.a.weight is not original[0]
    first.unpatch_model()
    assert model.a.weight is original[0] and not vars(model)[baking.RECORD]


def test_the_same_loras_give_the_same_bits_every_time(model_patcher, model):
    base = model_patcher.ModelPatcherDynamic(model)
    patched = base.clone()
    patched.add_patches({"a.weight": lora(model_patcher, 96)})
    seen = []
    for _ in range(3):
        patched.load()
        seen.append(model.a.weight._qdata.clone())
        base.load()
    assert all(torch.equal(seen[0], other) for other in seen)


def test_who_asks_for_the_weight_is_given_the_original_or_lora_would_be_added_twice(model_patcher, model):
    patcher = model_patcher.ModelPatcherDynamic(model)
    patcher.add_patches({"a.weight": lora(model_patcher, 96)})
    wanted = patcher.patch_weight_to_device("a.weight")
    original = model.a.weight
    patcher.load()
    assert model_patcher.get_key_weight(model, "a.weight")[0] is original
    assert torch.equal(patcher.patch_weight_to_device("a.weight"), wanted)


def test_a_weight_that_someone_else_put_there_since_is_respected(model_patcher, model):
    patcher = model_patcher.ModelPatcherDynamic(model)
    patcher.add_patches({"a.weight": lora(model_patcher, 96)})
    patcher.load()
    model.a.weight = other = torch.nn.Parameter(torch.randn(96, 256), requires_grad=False)
    assert model_patcher.get_key_weight(model, "a.weight")[0] is other
    patcher.unpatch_model()
    assert model.a.weight is other


def test_a_weight_that_was_replaced_behind_its_back_is_baked_anew(model_patcher, model):
    patcher = model_patcher.ModelPatcherDynamic(model)
    adapter = lora(model_patcher, 96)
    patcher.add_patches({"a.weight": adapter})
    patcher.load()
    weight = torch.randn(96, 256)
    model.a.weight = torch.nn.Parameter(nvfp4(weight), requires_grad=False)
    patcher.load()
    assert error(model.a.weight.dequantize(), weight + adapter.delta()) < 0.15


def test_only_the_small_factor_is_rotated(model_patcher, model, monkeypatch):
    patcher, sizes, rotate = model_patcher.ModelPatcherDynamic(model), [], rotation._rotate
    patcher.add_patches({"a.weight": lora(model_patcher, 96, rank=4)})
    monkeypatch.setattr(rotation, "_rotate", lambda x, *rest: sizes.append(x.numel()) or rotate(x, *rest))
    patcher.load()
    assert sizes == [4 * 256]


def test_the_delta_is_rounded_once_and_so_more_exact_than_by_way_of_the_model_s_basis(model_patcher, model):
    adapter = lora(model_patcher, 96)
    original = model.a.weight.to(torch.bfloat16)
    wanted = original.to(torch.float32).dequantize() + adapter.delta()
    patches = {"a.weight": [(1.0, adapter, 1.0, None, None)]}
    direct = baking.baked(original, "a.weight", patches, 0, torch.device("cpu"), model_patcher)
    summed = original.dequantize() + adapter.delta().to(torch.bfloat16)
    roundabout = QuantizedTensor.from_float(summed, original._layout_cls)
    assert error(direct.dequantize(), wanted) < 1.01 * error(roundabout.dequantize(), wanted)


@pytest.mark.parametrize("patch", [
    {"offset": (0, 32, 64)}, {"strength": -0.7}, {"strength_model": 0.5}, {"function": lambda delta: delta * 2},
    {"offset": (1, 64, 192)},
], ids=("rows", "negative", "strength of the model", "function", "columns"))
def test_every_kind_of_patch_is_baked_right(model_patcher, model, patch):
    rows = 64 if patch.get("offset", (1,))[0] == 0 else 96
    adapter = lora(model_patcher, rows)
    if patch.get("offset", (0,))[0] == 1:
        adapter = model_patcher.LoRAAdapter(torch.randn(96, 4), torch.randn(4, 192), None, None, None, None)
    patcher = model_patcher.ModelPatcherDynamic(model)
    patcher.add_patches({"a.weight": adapter}, **patch)
    wanted = patcher.patch_weight_to_device("a.weight")
    patcher.load()
    assert error(model.a.weight.dequantize(), wanted) < 0.15


def test_several_loras_and_an_adapter_of_another_kind_are_baked_together(model_patcher, model):
    patcher = model_patcher.ModelPatcherDynamic(model)
    patcher.add_patches({"a.weight": lora(model_patcher, 96)}, 0.5)
    other = lora(model_patcher, 96)
    other.name = "loha"
    patcher.add_patches({"a.weight": other}, 0.25)
    wanted = patcher.patch_weight_to_device("a.weight")
    patcher.load()
    assert error(model.a.weight.dequantize(), wanted) < 0.15


def test_a_convolution_s_lora_is_baked_in_its_basis(model_patcher, has_int8):
    weight = torch.randn(24, 32, 3, 3)
    model = torch.nn.Module()
    model.c = Layer(QuantizedTensor.from_float(weight, layouts.convolution(16)))
    adapter = model_patcher.LoRAAdapter(torch.randn(24, 4, 1, 1), torch.randn(4, 32, 3, 3), 4.0, None, None, None)
    patcher = model_patcher.ModelPatcherDynamic(model)
    patcher.add_patches({"c.weight": adapter}, 0.5)
    patcher.load()
    assert model.c.weight_lowvram_function is None
    assert error(model.c.weight.dequantize(), weight + 0.5 * adapter.delta().reshape(weight.shape)) < 0.02


def test_a_layer_that_comfyui_has_patched_itself_is_left_to_it(model_patcher, model):
    patcher = model_patcher.ModelPatcherDynamic(model)
    patcher.add_patches({"a.weight": lora(model_patcher, 96)})
    model.a.weight_lowvram_function = None
    original = model.a.weight
    assert baking.bake(patcher, model_patcher) == 0 and model.a.weight is original


def test_a_weight_that_cannot_be_baked_is_left_to_comfyui_with_its_lora(model_patcher, model, monkeypatch, caplog):
    patcher = model_patcher.ModelPatcherDynamic(model)
    patcher.add_patches({"a.weight": lora(model_patcher, 96), "b.weight": lora(model_patcher, 64)})
    original, bake_one = model.a.weight, baking.baked

    def out_of_memory(weight, key, *rest):
        if key == "a.weight":
            raise RuntimeError("out of memory")
        return bake_one(weight, key, *rest)

    monkeypatch.setattr(baking, "baked", out_of_memory)
    patcher.load()
    assert model.a.weight is original and model.a.weight_lowvram_function is not None
    assert model.b.weight_lowvram_function is None
    assert "a.weight is left to ComfyUI: RuntimeError: out of memory" in caplog.text


def test_a_model_without_patches_is_not_touched(model_patcher, model):
    patcher = model_patcher.ModelPatcherDynamic(model)
    patcher.load()
    assert baking.RECORD not in vars(model) and patcher.pins_dropped == 0


def test_taking_the_hook_back_leaves_comfyui_as_it_was(model_patcher):
    dynamic = model_patcher.ModelPatcherDynamic
    names = (dynamic, "load"), (dynamic, "unpatch_model"), (model_patcher, "get_key_weight")
    before = [vars(owner)[name] for owner, name in names]
    patching.take_back(put(bake, model_patcher, "again"))
    assert [vars(owner)[name] for owner, name in names] == before


def test_dynamic_vram_is_the_reason_for_it(model_patcher):
    assert bake.examine(model_patcher).verdict == NEEDED


def test_a_comfyui_without_dynamic_vram_is_incompatible(model_patcher):
    del model_patcher.ModelPatcherDynamic.partially_unload_ram
    assert "has no partially_unload_ram" in bake.examine(model_patcher).reason
    del model_patcher.ModelPatcherDynamic
    assert bake.examine(model_patcher).verdict == INCOMPATIBLE
