"""What the hook modules say of targets of other shapes, and that they leave other models alone."""

from types import ModuleType, SimpleNamespace

import pytest

from qpatch.hooks.lora_loader import file_names, key_map, loading, patchers


def module(**names):
    made = ModuleType("made")
    vars(made).update(names)
    return made


def test_a_loader_with_another_signature_is_left_alone_and_named():
    found = loading.examine(module(load_lora_for_models=lambda model, lora, strength: None))
    assert found.verdict == "incompatible" and "(model, lora, strength, ...)" in found.reason


def test_a_release_without_the_bypass_loader_is_patched_without_it():
    target = module(load_lora_for_models=lambda model, clip, lora, strength_model, strength_clip: None)
    assert loading.examine(target).verdict == "needed"
    assert [patch.name for patch in loading.patches(target)] == ["load_lora_for_models"]


def test_a_key_map_function_of_another_shape_is_left_alone():
    assert key_map.examine(module(model_lora_keys_unet=lambda model: {})).verdict == "incompatible"
    assert key_map.examine(module()).verdict == "incompatible"


def test_without_load_torch_file_names_are_not_known_and_it_says_so():
    assert file_names.examine(module()).verdict == "incompatible"


def test_a_patcher_without_injections_is_left_alone_and_what_it_lacks_is_named():
    old = type("NunchakuModelPatcher", (), {"add_patches": None, "add_hook_patches": None, "clone": None})
    found = patchers.examine(module(NunchakuModelPatcher=old))
    assert found.verdict == "incompatible" and "set_injections" in found.reason


@pytest.mark.parametrize("own_path, said", [
    (True, "own LoRA path (plain LoRA only) is bypassed"), (False, "ignores every LoRA")])
def test_the_reason_tells_the_two_patchers_of_the_pack_apart(own_path, said):
    abilities = dict.fromkeys((*patchers.models.ABILITIES, "add_patches", "add_hook_patches"))
    cls = type("ZImageModelPatcher", (), {**abilities, **({"patch_weight_to_device": None} if own_path else {})})
    found = patchers.examine(module(ZImageModelPatcher=cls))
    assert found.verdict == "needed" and said in found.reason


def test_another_model_s_lora_goes_to_comfyui_with_the_very_same_arguments():
    seen = []
    load = loading.through_qpatch(lambda *args, **kwargs: seen.append((args, kwargs)) or ("model", "clip"))
    patcher, clip, lora = SimpleNamespace(model=SimpleNamespace(diffusion_model=None)), object(), {"key": 1}
    assert load(patcher, clip, lora, 0.5, 0.25, lora_metadata={"a": "b"}) == ("model", "clip")
    ((args, kwargs),) = seen
    assert args[0] is patcher and args[1] is clip and args[2] is lora and args[3:] == (0.5, 0.25)
    assert kwargs == {"lora_metadata": {"a": "b"}}


def test_a_text_encoder_alone_goes_to_comfyui():
    load = loading.through_qpatch(lambda *args: args)
    assert load(None, "clip", {"key": 1}, 0.5, 0.25) == (None, "clip", {"key": 1}, 0.5, 0.25)


def test_patches_of_another_model_go_to_the_original():
    add = patchers.taking_loras(lambda self, patches, *strengths: ("original", patches, strengths))
    other = SimpleNamespace(model=SimpleNamespace(diffusion_model=None))
    assert add(other, {"key": 1}, 0.5, 1.0) == ("original", {"key": 1}, (0.5, 1.0))
