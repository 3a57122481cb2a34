"""Repairs of model classes: ``qwen_calls``, ``flux_wrapper`` and ``config_copy``."""

import copy
import logging
import pickle

import pytest
import torch


@pytest.fixture
def qwen(core, standin):
    return standin("compat/pack_qwenimage.py", "pack.models.qwenimage")


def test_the_stand_in_takes_reference_latents_for_guidance(qwen):
    got = qwen.NunchakuQwenImageTransformer2DModel()("x", "t", "c", ref_latents=["a latent"])
    assert (got["guidance"], got["ref_latents"]) == (["a latent"], None)


def test_each_argument_arrives_under_its_own_name(qwen, mend):
    found = mend("qwen_calls", qwen)
    assert found.verdict == "needed" and "it takes ref_latents for guidance" in found.reason
    got = qwen.NunchakuQwenImageTransformer2DModel()(
        "x", "t", "c", "mask", ["a latent"], transformer_options={"o": 1}, control="control",
        ref_latents_method="index")
    wanted = {"x": "x", "timesteps": "t", "context": "c", "attention_mask": "mask", "guidance": None,
              "ref_latents": ["a latent"], "control": "control"}
    assert {name: got[name] for name in wanted} == wanted
    assert got["transformer_options"] == {"o": 1} and got["kwargs"] == {"ref_latents_method": "index"}


def test_guidance_in_keywords_is_seen_once(qwen, mend):
    mend("qwen_calls", qwen)
    got = qwen.NunchakuQwenImageTransformer2DModel()("x", "t", "c", guidance=3.5, transformer_options={"guidance": 3.5})
    assert got["guidance"] == 3.5 and "guidance" not in got["kwargs"]


def test_an_argument_with_a_value_that_the_pack_does_not_know_is_said(qwen, mend, caplog):
    mend("qwen_calls", qwen)
    with caplog.at_level(logging.WARNING):
        got = qwen.NunchakuQwenImageTransformer2DModel()("x", "t", "c", additional_t_cond=1)
    assert "does not know additional_t_cond" in caplog.text
    assert "additional_t_cond" not in got["kwargs"]


def test_two_values_for_one_argument_are_an_error(qwen, mend):
    mend("qwen_calls", qwen)
    with pytest.raises(TypeError, match="two values for context"):
        qwen.NunchakuQwenImageTransformer2DModel()._forward("x", "t", "c", context="another")


def test_a_block_takes_what_comfyui_s_own_block_takes(qwen, mend):
    block = qwen.NunchakuQwenImageTransformerBlock()
    with pytest.raises(TypeError, match="transformer_options"):
        block("img", "txt", "mask", "temb", transformer_options={})
    mend("qwen_calls", qwen)
    got = block("img", "txt", "mask", "temb", timestep_zero_index=4, transformer_options={"patches": 1})
    assert got == ("txt", "img", 4)
    with pytest.raises(TypeError, match="missing"):
        block("img", transformer_options={})
    with pytest.raises(TypeError, match="shift=2"):
        block("img", "txt", "mask", "temb", shift=2)


def test_a_pack_of_this_age_is_left_alone(core, standin, mend):
    mended = standin("compat/pack_qwenimage.py", "pack.models.qwenimage",
                     ("guidance=None, ref_latents=None,", "ref_latents=None, additional_t_cond=None,"),
                     ("timestep_zero_index=None):", "timestep_zero_index=None, transformer_options={}):"))
    assert mend("qwen_calls", mended).verdict == "not-needed"


class Inside(torch.nn.Module):
    patch_embed = 7

    def __init__(self):
        super().__init__()
        self.img_in = torch.nn.Linear(2, 2)


@pytest.fixture
def flux(standin):
    return standin("compat/flux_wrapper.py", "pack.wrappers.flux")


def test_a_flux_wrapper_shows_the_model_inside(flux, mend):
    with pytest.raises(AttributeError):
        flux.ComfyFluxWrapper(Inside(), {}).img_in
    assert mend("flux_wrapper", flux).verdict == "needed"
    wrapper = flux.ComfyFluxWrapper(Inside(), {"patch_size": 2})
    assert wrapper.img_in is wrapper.model.img_in
    assert (wrapper.patch_embed, wrapper.patch_size, wrapper.loras, wrapper.dtype) == (7, 2, [], torch.float32)


def test_what_is_in_neither_is_still_missing(flux, mend):
    mend("flux_wrapper", flux)
    wrapper = flux.ComfyFluxWrapper(Inside(), {})
    with pytest.raises(AttributeError, match="nope"):
        wrapper.nope


def test_setting_a_layer_of_the_model_inside_changes_it_there(flux, mend):
    mend("flux_wrapper", flux)
    wrapper, other = flux.ComfyFluxWrapper(Inside(), {}), torch.nn.Linear(2, 2)
    wrapper.img_in = other
    assert wrapper.model.img_in is other and set(wrapper._modules) == {"model"}
    wrapper.loras = [1]
    assert wrapper.loras == [1] and not hasattr(wrapper.model, "loras")


def test_a_wrapper_can_be_copied_and_its_state_dict_is_the_same(flux, mend):
    before = list(flux.ComfyFluxWrapper(Inside(), {}).state_dict())
    mend("flux_wrapper", flux)
    copied = copy.deepcopy(flux.ComfyFluxWrapper(Inside(), {"patch_size": 2}))
    assert copied.img_in is copied.model.img_in and list(copied.state_dict()) == before


def test_a_wrapper_that_shows_the_model_itself_is_left_alone(standin, mend):
    mended = standin("compat/flux_wrapper.py", "pack.wrappers.flux", ("class ComfyFluxWrapper(torch.nn.Module):", (
        "class ComfyFluxWrapper(torch.nn.Module):\n    def __getattr__(self, name):\n"
        "        try:\n            return super().__getattr__(name)\n"
        "        except AttributeError:\n            return getattr(super().__getattr__('model'), name)\n")))
    assert mend("flux_wrapper", mended).verdict == "not-needed"


def test_copying_a_configuration_stops_without_the_repair(standin):
    base = standin("compat/supported_models_base.py", "comfy.supported_models_base").BASE
    with pytest.raises(TypeError, match="not callable"):
        copy.deepcopy(base({"dim": 2}))


def test_a_configuration_can_be_copied_and_pickled(standin, mend, caplog):
    module = standin("compat/supported_models_base.py", "comfy.supported_models_base")
    with caplog.at_level(logging.WARNING):
        assert mend("config_copy", module).verdict == "needed"
        config = module.BASE({"dim": [2]})
        copied, pickled = copy.deepcopy(config), pickle.loads(pickle.dumps(config))
    assert copied.unet_config == pickled.unet_config == {"dim": [2]}
    assert copied.unet_config["dim"] is not config.unet_config["dim"]
    assert "you accessed" not in caplog.text


def test_other_missing_names_are_answered_as_comfyui_answers_them(standin, mend, caplog):
    module = standin("compat/supported_models_base.py", "comfy.supported_models_base")
    mend("config_copy", module)
    assert module.BASE({}).scaled_fp8 is None
    assert "you accessed scaled_fp8" in caplog.text


@pytest.mark.parametrize("change", [
    ("def __getattr__", "def other"), ("        return None", "        raise AttributeError(name)"),
])
def test_a_configuration_that_claims_nothing_is_left_alone(standin, mend, change):
    module = standin("compat/supported_models_base.py", "comfy.supported_models_base", change)
    assert mend("config_copy", module).verdict == "not-needed"
