"""A mixed pack in ComfyUI's dynamic VRAM: LoRA at each cast, and baked once by ``convrot-bake``."""

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor
from convrot_reference import error, put

from qpatch import patching
from qpatch.hooks.convrot import bake

pytestmark = pytest.mark.comfyui
QUANTIZED, REQUANTIZED = 0.16, 0.30


@pytest.fixture
def patcher(comfy, pack, vram):
    made = comfy.model_patcher.ModelPatcherDynamic(pack.model(disabled=()), vram.device, torch.device("cpu"))
    assert type(made) is comfy.model_patcher.ModelPatcherDynamic
    return made


@pytest.fixture
def baking(comfy, vram):
    """The hook that is off by default, put there for the time of a test."""
    assert bake.examine(comfy.model_patcher).verdict == "needed"
    patches = put(bake, comfy.model_patcher, "convrot-bake")
    yield
    patching.take_back(patches)


def weight_on_device(comfy, vram, layer, requantized):
    """The weight as ComfyUI's cast hands it to a product on the device, dequantized."""
    weight, bias, stream = comfy.ops.cast_bias_weight(
        layer, dtype=torch.float32, device=vram.device, bias_dtype=torch.float32, offloadable=True,
        compute_dtype=torch.float32, want_requant=requantized)
    comfy.ops.uncast_bias_weight(layer, weight, bias, stream)
    return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight


def check(comfy, vram, patcher, pack, deltas, bound):
    for kind in pack.kinds:
        layer = patcher.model.diffusion_model.get_submodule(kind)
        for requantized in (True, False):
            found = weight_on_device(comfy, vram, layer, requantized)
            assert error(found, pack.weights[kind] + deltas.get(kind, 0)) < bound, (kind, requantized)


def patched(patcher, pack, kinds=None, strength=1.0):
    patches, deltas = pack.lora(kinds or pack.kinds)
    clone = patcher.clone()
    clone.add_patches(patches, strength)
    return clone, {kind: strength * delta for kind, delta in deltas.items()}


def test_weights_arrive_un_rotated_and_with_their_lora(comfy, vram, patcher, pack):
    clone, deltas = patched(patcher, pack)
    for _ in range(3):
        patcher.partially_load(vram.device)
        check(comfy, vram, patcher, pack, {}, QUANTIZED)
        clone.partially_load(vram.device)
        check(comfy, vram, clone, pack, deltas, REQUANTIZED)
        vram.evict()
        check(comfy, vram, clone, pack, deltas, REQUANTIZED)


def test_weights_without_room_on_the_device_are_right_too(comfy, vram, patcher, pack):
    clone, deltas = patched(patcher, pack)
    vram.room = False
    clone.partially_load(vram.device)
    check(comfy, vram, clone, pack, deltas, REQUANTIZED)


def test_what_lies_on_the_device_is_of_the_rotated_layout(comfy, vram, patcher):
    patcher.partially_load(vram.device)
    layer = patcher.model.diffusion_model.nvfp4
    weight_on_device(comfy, vram, layer, True)
    assert layer._v_weight._layout_cls == layer.weight._layout_cls == "TensorCoreNVFP4LayoutConvRot64"


def test_baked_weights_are_right_and_put_back_as_the_same_objects(comfy, vram, patcher, pack, baking):
    rotated = [kind for kind in pack.kinds if kind != "plain"]
    layers = {kind: patcher.model.diffusion_model.get_submodule(kind) for kind in pack.kinds}
    originals = {kind: layer.weight for kind, layer in layers.items()}
    clone, deltas = patched(patcher, pack)
    other, other_deltas = patched(patcher, pack, ["nvfp4"], strength=-0.7)
    for _ in range(3):
        clone.partially_load(vram.device)
        check(comfy, vram, clone, pack, deltas, REQUANTIZED)
        assert all(layers[kind].weight_lowvram_function is None for kind in rotated)
        baked = layers["nvfp4"].weight
        clone.partially_load(vram.device)
        assert layers["nvfp4"].weight is baked
        other.partially_load(vram.device)
        check(comfy, vram, other, pack, other_deltas, REQUANTIZED)
        patcher.partially_load(vram.device)
        check(comfy, vram, patcher, pack, {}, QUANTIZED)
        assert all(layers[kind].weight is weight for kind, weight in originals.items())
    clone.partially_load(vram.device)
    clone.detach()
    assert all(layers[kind].weight is weight for kind, weight in originals.items())


def test_baking_and_comfyui_s_own_cast_agree(comfy, vram, patcher, pack):
    clone, deltas = patched(patcher, pack, ["nvfp4"])
    clone.partially_load(vram.device)
    layer = clone.model.diffusion_model.nvfp4
    stock = weight_on_device(comfy, vram, layer, True)
    patches = put(bake, comfy.model_patcher, "convrot-bake")
    try:
        clone.partially_load(vram.device)
        baked = weight_on_device(comfy, vram, layer, True)
    finally:
        patching.take_back(patches)
    wanted = pack.weights["nvfp4"] + deltas["nvfp4"]
    assert error(baked, wanted) < 1.05 * error(stock, wanted)


def test_a_baked_model_is_saved_with_its_lora_once(comfy, vram, patcher, pack, baking):
    clone, deltas = patched(patcher, pack, ["nvfp4"])
    clone.partially_load(vram.device)
    found = clone.patch_weight_to_device("diffusion_model.nvfp4.weight", return_weight=True)
    assert error(found.dequantize(), pack.weights["nvfp4"] + deltas["nvfp4"]) < REQUANTIZED
