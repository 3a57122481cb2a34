"""Hook ``convrot`` on comfy.model_detection: sizes are read off logical shapes."""

from types import ModuleType

import pytest
import torch
from convrot_reference import put, settings_tensor

from qpatch.finding import INCOMPATIBLE, NEEDED, NOT_NEEDED
from qpatch.hooks.convrot import detection

KEY = "1.transformer_blocks.0.attn2.to_k"


def calculate_transformer_depth(prefix, keys, state_dict):
    return 1, state_dict[f"{prefix}{KEY}.weight"].shape[1], True, False, False


@pytest.fixture
def model_detection():
    """A stand-in of comfy.model_detection that looks at one weight."""
    module = ModuleType("model_detection")
    module.calculate_transformer_depth = calculate_transformer_depth
    module.detect_unet_config = lambda state_dict, key_prefix, metadata=None: {
        "context_dim": calculate_transformer_depth(key_prefix, list(state_dict), state_dict)[1], "metadata": metadata}
    return module


def packed(**settings):
    weight = torch.zeros(640, 1024, dtype=torch.uint8)
    return {f"m.{KEY}.weight": weight, f"m.{KEY}.comfy_quant": settings_tensor(**settings)}


def test_a_packed_layer_is_seen_in_its_own_size(model_detection):
    entries = packed(format="nvfp4", convrot=True)
    assert model_detection.detect_unet_config(entries, "m.")["context_dim"] == 1024
    assert detection.examine(model_detection).verdict == NEEDED
    put(detection, model_detection, "convrot")
    found = model_detection.detect_unet_config(entries, "m.", metadata={"a": 1})
    assert found == {"context_dim": 2048, "metadata": {"a": 1}}
    assert entries[f"m.{KEY}.weight"].shape == (640, 1024)


def test_the_shape_that_the_file_gives_goes_before_twice_the_storage(model_detection):
    put(detection, model_detection, "convrot")
    entries = packed(format="nvfp4", params={"orig_shape": [640, 2044]})
    assert model_detection.detect_unet_config(entries, "m.")["context_dim"] == 2044


@pytest.mark.parametrize("settings", [{"format": "int8_tensorwise"}, {"format": "float8_e4m3fn"}, {"convrot": True}])
def test_other_formats_are_seen_as_they_are(settings):
    entries = packed(**settings)
    assert detection.logical_shapes(entries, "m.") is entries


def test_other_parts_of_the_file_are_seen_as_they_are():
    entries = packed(format="nvfp4")
    assert detection.logical_shapes(entries, "model.diffusion_model.") is entries


def test_what_cannot_be_read_is_seen_as_it_is():
    entries = {**packed(format="nvfp4"), f"m.{KEY}.comfy_quant": torch.tensor([255], dtype=torch.uint8)}
    assert detection.logical_shapes(entries, "m.") is entries
    without_weight = {"m.a.comfy_quant": settings_tensor(format="nvfp4")}
    assert detection.logical_shapes(without_weight, "m.") is without_weight


def test_a_dict_without_quantized_layers_is_handed_on_as_it_is():
    entries = {"m.weight": torch.zeros(2, 2)}
    assert detection.logical_shapes(entries, "m.") is entries


def test_what_stands_for_a_weight_takes_no_memory():
    found = detection.logical_shapes(packed(format="nvfp4"), "m.")[f"m.{KEY}.weight"]
    assert found.shape == (640, 2048) and found.untyped_storage().nbytes() == 4


def test_a_comfyui_that_knows_by_itself_needs_nothing(model_detection):
    model_detection.calculate_transformer_depth = lambda prefix, keys, state_dict: (1, 32, True, False, False)
    assert detection.examine(model_detection).verdict == NOT_NEEDED


def test_another_shape_of_the_module_is_incompatible(model_detection):
    model_detection.calculate_transformer_depth = lambda: None
    assert detection.examine(model_detection).verdict == INCOMPATIBLE
    del model_detection.calculate_transformer_depth
    assert detection.examine(model_detection).verdict == INCOMPATIBLE
