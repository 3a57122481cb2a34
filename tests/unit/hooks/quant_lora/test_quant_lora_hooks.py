"""Hook quant-lora: bypass mode keeps all its LoRAs, and upstream that is not known is left alone."""

from types import ModuleType, SimpleNamespace

import pytest

from qpatch import catalogue, toggles
from qpatch.finding import INCOMPATIBLE, NEEDED, NOT_NEEDED
from qpatch.hooks.quant_lora import bypass, fused, options, patchers, report


class Injection:
    def __init__(self, inject, eject):
        self.inject, self.eject = inject, eject


class Patcher:
    def __init__(self, injections=()):
        self.injections = {bypass.NAME: list(injections)}

    def get_injections(self, key):
        return self.injections.get(key)

    def set_injections(self, key, injections):
        self.injections[key] = injections

    def clone(self):
        return Patcher(self.injections[bypass.NAME])


class Layer:
    def forward(self, x):
        return x


def wrapping(layer, add):
    """ComfyUI's way: a forward in front of the one that is there, which is put back by the one that took its place."""
    kept = []

    def inject(patcher):
        kept.append(layer.forward)
        before = layer.forward
        layer.forward = lambda x: before(x) + add

    def eject(patcher):
        layer.forward = kept.pop()

    return Injection(inject, eject)


def load(model, clip, lora, strength_model, strength_clip):
    """ComfyUI's loading function: the new injections replace those of the clone's parent, if there are any."""
    clone, new_clip = model.clone(), clip and SimpleNamespace(patcher=clip.patcher.clone())
    if lora:
        clone.set_injections(bypass.NAME, [wrapping(*lora)])
        if clip is not None:
            new_clip.patcher.set_injections(bypass.NAME, [wrapping(*lora)])
    return clone, new_clip


def test_two_loras_in_bypass_mode_both_act_and_both_go():
    layer, loading = Layer(), bypass.keeping_both(load)
    first, _ = loading(Patcher(), None, (layer, 1), 1.0, 1.0)
    second, _ = loading(first, None, (layer, 10), 1.0, 1.0)
    third, _ = loading(second, None, (layer, 100), 1.0, 1.0)
    unchanged, _ = loading(third, None, None, 1.0, 1.0)
    for patcher, wanted in ((first, 1), (second, 11), (third, 111), (unchanged, 111)):
        for injection in patcher.get_injections(bypass.NAME):
            injection.inject(patcher)
        assert layer.forward(0) == wanted
        for injection in patcher.get_injections(bypass.NAME):
            injection.eject(patcher)
        assert layer.forward(0) == 0 and layer.forward.__func__ is Layer.forward


def test_the_text_encoder_keeps_both_as_well():
    layer, loading = Layer(), bypass.keeping_both(load)
    _, clip = loading(Patcher(), SimpleNamespace(patcher=Patcher()), (layer, 1), 1.0, 1.0)
    _, clip = loading(Patcher(), clip, (layer, 10), 1.0, 1.0)
    [injection] = clip.patcher.get_injections(bypass.NAME)
    injection.inject(None)
    assert layer.forward(0) == 11


def module(name, **contents):
    made = ModuleType(name)
    vars(made).update(contents)
    return made


def test_upstream_of_another_shape_is_left_alone():
    class Short:
        def load(self):
            pass

    assert patchers.examine(module("comfy.model_patcher", ModelPatcher=Short)).verdict == INCOMPATIBLE
    assert fused.examine(module("comfy.ops")).verdict == NOT_NEEDED
    assert fused.examine(module("comfy.ops", linear_input_act=load)).verdict == INCOMPATIBLE
    assert bypass.examine(module("comfy.sd")).verdict == NOT_NEEDED
    assert bypass.examine(module("comfy.sd", load_bypass_lora_for_models=load)).verdict == NEEDED


def test_a_patcher_without_a_force_flag_is_not_the_known_one(standin):
    other_name = ("force_patch_weights=False", "forced=False")
    patcher = standin("quant_lora/model_patcher.py", "comfy.model_patcher", other_name)
    assert patchers.examine(patcher).verdict == INCOMPATIBLE
    assert "takes (" in patchers.examine(patcher).reason


@pytest.mark.parametrize(("value", "wanted"), (("", "auto"), ("side", "side"), (" Bake ", "bake"), ("sid", "auto")))
def test_the_toggle_is_read_and_a_misspelled_value_is_said(monkeypatch, caplog, value, wanted):
    options._mode.cache_clear()
    monkeypatch.setenv(options.VARIABLE, value)
    assert options.mode() == wanted and ("'sid' is none of" in caplog.text) == (value == "sid")
    complaints = [complaint for complaint in toggles.complaints() if options.VARIABLE in complaint]
    assert bool(complaints) == (value == "sid")
    known = catalogue.named("quant-lora").variables[options.VARIABLE]
    assert set(known) == {options.SIDE, options.BAKE, options.AUTO}


def test_status_has_nothing_to_say_where_no_model_is_loaded():
    assert report.details() is None
