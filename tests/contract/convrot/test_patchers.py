"""A mixed pack in ComfyUI's own ModelPatcher: LoRA at full load, at low VRAM, switched, unloaded, ten times over."""

import pytest
import torch
from convrot_reference import error

pytestmark = pytest.mark.comfyui
CPU = torch.device("cpu")
#: Of the output of the whole block. The float reference takes the un-quantized weights, so this is what
#: quantizing all layers costs (0.09 for one NVFP4 layer) plus stochastic rounding where LoRA is baked in.
QUANTIZED, REQUANTIZED = 0.16, 0.30


@pytest.fixture
def patcher(comfy, pack):
    return comfy.model_patcher.ModelPatcher(pack.model(), load_device=CPU, offload_device=CPU)


def run(patcher, x):
    with torch.inference_mode():
        return patcher.model.diffusion_model(x)


def patched(patcher, pack, kinds=None, strength=1.0):
    """A clone of ``patcher`` with a LoRA on ``kinds`` (all layers), and the float model's deltas."""
    patches, deltas = pack.lora(kinds or pack.kinds)
    clone = patcher.clone()
    assert len(clone.add_patches(patches, strength)) == len(patches)
    return clone, {kind: strength * delta for kind, delta in deltas.items()}


@pytest.mark.parametrize("strength", (1.0, -0.5))
def test_lora_at_full_load_is_added_to_the_weights_and_taken_out_again(patcher, pack, strength):
    x = torch.randn(64, 256)
    patcher.patch_model(CPU)
    before = run(patcher, x)
    assert error(before, pack.reference(x)) < QUANTIZED
    patcher.unpatch_model(CPU)
    clone, deltas = patched(patcher, pack, strength=strength)
    assert error(pack.reference(x, deltas), pack.reference(x)) > 0.4
    clone.patch_model(CPU)
    assert error(run(clone, x), pack.reference(x, deltas)) < REQUANTIZED
    clone.unpatch_model(CPU)
    assert torch.equal(run(patcher, x), before)


def test_lora_on_a_model_that_does_not_fit_is_added_as_the_weights_are_used(patcher, pack):
    x = torch.randn(64, 256)
    clone, deltas = patched(patcher, pack)
    clone.patch_model(CPU, lowvram_model_memory=1)
    assert clone.model.model_lowvram
    # Not requantized there: the output is as exact as without a LoRA.
    assert error(run(clone, x), pack.reference(x, deltas)) < QUANTIZED
    clone.unpatch_model(CPU)


def test_a_partly_unloaded_model_stays_right(patcher, pack):
    x = torch.randn(64, 256)
    clone, deltas = patched(patcher, pack)
    clone.patch_model(CPU)
    clone.partially_unload(CPU, clone.model_size() // 2)
    assert error(run(clone, x), pack.reference(x, deltas)) < REQUANTIZED
    clone.partially_unload(CPU, clone.model_size() * 2)
    assert error(run(clone, x), pack.reference(x, deltas)) < QUANTIZED
    clone.unpatch_model(CPU)


@pytest.mark.parametrize("memory", (0, 1), ids=("full load", "low VRAM"))
def test_loading_with_lora_gives_the_same_bits_ten_times_over(patcher, pack, memory):
    x = torch.randn(64, 256)
    clone, _ = patched(patcher, pack)
    seen = []
    for _ in range(10):
        patcher.patch_model(CPU, lowvram_model_memory=memory)
        without = run(patcher, x)
        patcher.unpatch_model(CPU)
        clone.patch_model(CPU, lowvram_model_memory=memory)
        seen.append((without, run(clone, x)))
        clone.unpatch_model(CPU)
    for pair in seen[1:]:
        assert torch.equal(pair[0], seen[0][0]) and torch.equal(pair[1], seen[0][1])


def test_two_clones_with_different_loras_never_see_each_other_s(patcher, pack):
    x = torch.randn(64, 256)
    first, first_deltas = patched(patcher, pack, ["nvfp4"])
    second, second_deltas = patched(patcher, pack, pack.kinds[1:])
    for _ in range(2):
        for clone, deltas in ((first, first_deltas), (second, second_deltas), (patcher, {})):
            clone.patch_model(CPU)
            assert error(run(clone, x), pack.reference(x, deltas)) < REQUANTIZED
            clone.unpatch_model(CPU)


def test_the_management_of_models_reloads_through_the_object_it_has_kept(comfy, patcher, pack):
    """What a purge node does: unload all; the loader's output, the patcher, is then used again."""
    x = torch.randn(64, 256)
    clone, deltas = patched(patcher, pack)
    seen = []
    for _ in range(3):
        comfy.model_management.load_models_gpu([clone])
        seen.append(run(clone, x))
        comfy.model_management.unload_all_models()
        comfy.model_management.soft_empty_cache()
    assert error(seen[0], pack.reference(x, deltas)) < REQUANTIZED
    assert all(torch.equal(seen[0], other) for other in seen)


def test_models_of_other_kinds_in_between_leave_nothing_behind(comfy, pack, formats):
    """Z-Image, SDXL, Krea2, Z-Image in one process: packs with other layers, sizes and dtypes, in turn."""
    x = torch.randn(64, 256)
    first = pack.block()
    with torch.inference_mode():
        before = first(x)
        for kinds, dtype in (
                (["kernel", "plain"], torch.float16), (["int8"], torch.bfloat16), (["plain"], torch.float32)):
            other = type(pack)(comfy, [kind for kind in kinds if kind in formats])
            block = other.block(dtype=dtype).to(dtype)
            assert error(block(x.to(dtype)), other.reference(x)) < 0.05
            assert not [name for module in block.modules() for name in vars(module) if "qpatch" in name]
        assert torch.equal(pack.block()(x), before) and torch.equal(first(x), before)
