"""LoRA hooks switched off: ComfyUI and ComfyUI-nunchaku as they are, and what the reports say then."""

import logging

import pytest
import torch
from emulation import effect, merging, world
from emulation.cases import load

import qpatch
from qpatch import states
from qpatch.catalogue import named
from qpatch.layers import marked


@pytest.fixture
def enter(monkeypatch):
    """``with enter("a,b"):`` the stand-ins, imported anew with these hooks disabled."""
    def enter(disabled=""):
        monkeypatch.setenv("QPATCH_DISABLE", disabled)
        qpatch.activate()
        return world.standins()
    return enter


def test_switched_off_no_function_of_comfyui_has_a_layer_of_the_hook(enter):
    with enter("lora-loader"):
        import comfy.lora
        import comfy.sd
        import comfy.utils

        functions = [comfy.sd.load_lora_for_models, comfy.sd.load_bypass_lora_for_models,
                     comfy.lora.model_lora_keys_unet, comfy.utils.load_torch_file]
        for name, cls in (("common", "NunchakuModelPatcher"), ("zimage", "ZImageModelPatcher")):
            patcher = getattr(world.of_pack(f"model_patcher.{name}"), cls)
            functions += [getattr(patcher, method) for method in (
                "add_patches", "add_hook_patches", "get_key_patches", "model_state_dict", "patch_weight_to_device",
                "state_dict_for_saving", "load", "detach")]
        assert not any(marked(function, "lora-loader") for function in functions)
        assert states.overall(named("lora-loader")) == ("disabled", "QPATCH_DISABLE names it")
    with enter():
        import comfy.sd

        assert marked(comfy.sd.load_lora_for_models, "lora-loader")


def test_switched_off_qwen_image_ignores_loras_as_before(enter):
    with enter("lora-loader"):
        pair = effect.Pair("qwen-image")
        patcher = load(pair.quantized, effect.example("qwen-image"), 1.0)
        assert torch.equal(pair.run(patcher), pair.base)


def test_switched_off_z_image_takes_the_pack_s_own_path_with_its_limits(enter):
    with enter("lora-loader"):
        pair = effect.Pair("z-image")
        patcher = load(pair.quantized, effect.only(effect.example("z-image"), "qkv[q]", "qkv[v]"), 1.0)
        with pytest.raises(AssertionError):
            pair.run(patcher)


def test_switched_off_merging_stops_on_z_image_and_does_nothing_on_qwen_image(enter):
    with enter("lora-loader"):
        for family in effect.FAMILIES:
            pair = effect.Pair(family)
            with merging.doubled(pair):
                patches = pair.quantized.get_key_patches("diffusion_model.")
            patcher = pair.quantized.clone()
            patcher.add_patches(patches, 0.5, 2.0)
            if family == "z-image":
                with pytest.raises(AssertionError, match="Unexpected key"):
                    pair.run(patcher)
            else:
                assert torch.equal(pair.run(patcher), pair.base)


def test_the_two_paths_of_z_image_can_be_told_apart_in_the_status(enter):
    with enter():
        world.of_pack("model_patcher.zimage"), world.of_pack("model_patcher.common")
        told = {row["module"].rpartition(".model_patcher.")[2]: row["explanation"] for hook in states.snapshot()
                if hook["hook"] == "lora-loader" for row in hook["targets"] if ".model_patcher." in row["module"]}
        assert "own LoRA path (plain LoRA only) is bypassed" in told["zimage"]
        assert "ComfyUI-nunchaku ignores every LoRA" in told["common"]
    with enter("lora-loader"):
        world.of_pack("model_patcher.zimage"), world.of_pack("model_patcher.common")
        (hook,) = [hook for hook in states.snapshot() if hook["hook"] == "lora-loader"]
        assert {row["state"] for row in hook["targets"]} == {"disabled"}


def test_without_the_modulation_hook_those_layers_are_left_out_and_reported(enter, caplog):
    with enter("qwen-modulation"):
        pair, file = effect.Pair("qwen-image"), effect.example("qwen-image")
        kept = effect.only(file, *(target for target in file.layers if "_mod.1" not in target))
        with caplog.at_level(logging.INFO, logger="qpatch"):
            assert pair.error(load(pair.quantized, file, 0.02), [(kept, 0.02)]) < effect.TOLERANCE
    lines = [record.getMessage() for record in caplog.records if "lora #1" in record.getMessage()]
    assert lines[0] == "qpatch: lora #1 0.02 -> 30/34 layers"
    assert "qwen-modulation" in lines[1] and "img_mod.1" in lines[1]


def test_a_fault_in_qpatch_itself_leaves_the_model_running_without_and_says_so(enter, caplog, monkeypatch):
    from qpatch.hooks.lora_loader import running

    with enter():
        pair = effect.Pair("z-image")
        patcher = load(pair.quantized, effect.example("z-image"), 0.02)
        monkeypatch.setattr(running, "compose", lambda *_, **__: {}["fault"])
        with caplog.at_level(logging.WARNING, logger="qpatch"):
            assert torch.equal(pair.run(patcher), pair.base)
        assert "composing lora #1 failed" in caplog.text and "KeyError: 'fault'" in caplog.text
        monkeypatch.setenv("QPATCH_STRICT", "1")
        with pytest.raises(KeyError):
            pair.run(patcher)


def test_want_of_memory_goes_on_to_comfyui(enter, monkeypatch):
    from qpatch.hooks.lora_loader import running

    def out_of_memory(*_, **__):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 MiB")

    with enter():
        pair = effect.Pair("z-image")
        patcher = load(pair.quantized, effect.example("z-image"), 0.02)
        monkeypatch.setattr(running, "compose", out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            pair.run(patcher)
        assert pair.bare()
