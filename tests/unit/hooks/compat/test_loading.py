"""Repairs around loading a Nunchaku model: ``plain_dtype`` and ``svdq_lowvram``."""

import sys
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def zimage(comfy, standin):
    """The pack's model configuration, and beneath it all that it imports."""
    standin("packages/nunchaku/models/linear.py", "nunchaku.models.linear")
    standin("ComfyUI/comfy/model_base.py", "comfy.model_base")
    standin("ComfyUI/comfy/supported_models.py", "comfy.supported_models")
    standin("custom_nodes/ComfyUI-nunchaku/models/zimage.py", "pack.models.zimage")
    return standin("custom_nodes/ComfyUI-nunchaku/model_configs/zimage.py", "pack.model_configs.zimage")


class Plain(torch.nn.Module):
    """A model with two Linears that are not filled yet, as they are under dynamic VRAM, and a norm that is."""

    def __init__(self, comfy, dtype=torch.bfloat16):
        super().__init__()
        self.first = comfy.linear(4, 6, bias=True, dtype=dtype)
        self.second = comfy.linear(6, 2, dtype=dtype)
        self.norm = torch.nn.RMSNorm(6, dtype=dtype)


def _builds(zimage, monkeypatch, model):
    """The pack's configuration now builds ``model``."""
    monkeypatch.setattr(zimage, "patch_model", lambda *args, **kwargs: None)
    base = zimage.NunchakuZImage.__mro__[1]
    monkeypatch.setattr(base, "get_model", lambda *args, **kwargs: SimpleNamespace(diffusion_model=model))


def _loaded(comfy, zimage, monkeypatch, mend, dtype, mended=True):
    model = Plain(comfy)
    _builds(zimage, monkeypatch, model)
    if mended:
        assert mend("plain_dtype", zimage).verdict == "needed"
    built = zimage.NunchakuZImage().get_model({})
    numbers = {
        "first.weight": torch.randn(6, 4, dtype=dtype), "first.bias": torch.randn(6, dtype=dtype),
        "second.weight": torch.randn(2, 6, dtype=dtype), "norm.weight": torch.ones(6, dtype=dtype),
    }
    kept = {name: value.clone() for name, value in numbers.items()}
    comfy.memory.aimdo_enabled = True
    try:
        built.diffusion_model.load_state_dict(numbers)
    finally:
        comfy.memory.aimdo_enabled = False
    for name, value in kept.items():
        assert numbers[name].dtype == dtype and torch.equal(numbers[name], value), f"{name} of the file was changed"
    return model, kept


def test_the_stand_in_has_the_fault(comfy, zimage, monkeypatch, mend):
    model, _ = _loaded(comfy, zimage, monkeypatch, mend, torch.float32, mended=False)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.nn.functional.linear(torch.zeros(1, 4, dtype=torch.bfloat16), model.first.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_plain_layer_gets_its_declared_dtype_and_the_file_s_numbers(comfy, zimage, monkeypatch, mend, dtype):
    model, numbers = _loaded(comfy, zimage, monkeypatch, mend, dtype)
    for name, value in model.state_dict().items():
        assert value.dtype == torch.bfloat16, name
        assert torch.equal(value, numbers[name].to(torch.bfloat16)), name


def test_a_model_whose_layers_are_filled_gets_no_load_hook(comfy, zimage, monkeypatch, mend):
    model = torch.nn.Sequential(comfy.linear(4, 6, dtype=torch.bfloat16, lazy=False))
    _builds(zimage, monkeypatch, model)
    mend("plain_dtype", zimage)
    zimage.NunchakuZImage().get_model({})
    assert not model._load_state_dict_pre_hooks


def test_layers_without_a_declared_dtype_keep_the_file_s(comfy):
    from qpatch.hooks.compat.plain_dtype import declared

    assert declared(torch.nn.Sequential(comfy.linear(4, 6, dtype=None))) == {}


def test_integers_and_entries_of_other_layers_are_not_cast():
    from qpatch.hooks.compat.plain_dtype import cast

    state = {"a.weight": torch.zeros(2, dtype=torch.int8), "b.weight": torch.zeros(2)}
    cast({"a.weight": torch.bfloat16}, state, "")
    assert (state["a.weight"].dtype, state["b.weight"].dtype) == (torch.int8, torch.float32)


@pytest.mark.parametrize("change, verdict", [
    (("value.clone()", "value.to(self.weight_comfy_model_dtype)"), "not-needed"),
    (("self.comfy_need_lazy_init_bias = bias", "self.eager = bias"), "not-needed"),
])
def test_a_comfyui_whose_layers_cast_or_are_never_lazy_is_left_alone(comfy, zimage, standin, mend, change, verdict):
    standin("ComfyUI/comfy/ops.py", "comfy.ops", change)
    before = zimage.NunchakuZImage.get_model
    assert mend("plain_dtype", zimage).verdict == verdict
    assert zimage.NunchakuZImage.get_model is before


class Layer:
    pass


def test_an_offloadable_layer_gets_the_lists_that_the_low_vram_path_appends_to(comfy, zimage, mend):
    module = sys.modules["pack.models.zimage"]
    assert mend("svdq_lowvram", module).verdict == "needed"
    source, one, two = Layer(), Layer(), Layer()
    source.comfy_cast_weights = True
    for layer in (one, two):
        module.add_comfy_cast_weights_attr(layer, source)
    one.weight_function.append("a patch")
    assert (one.comfy_cast_weights, one.bias_function) == (True, [])
    assert two.weight_function == [], "two layers share one list"


def test_a_layer_that_is_not_offloadable_gets_nothing(comfy, zimage, mend):
    module = sys.modules["pack.models.zimage"]
    mend("svdq_lowvram", module)
    layer = Layer()
    module.add_comfy_cast_weights_attr(layer, Layer())
    assert vars(layer) == {}


def test_a_pack_whose_layers_have_the_lists_is_left_alone(comfy, standin, mend):
    standin("packages/nunchaku/models/linear.py", "nunchaku.models.linear")
    mended = standin("custom_nodes/ComfyUI-nunchaku/models/zimage.py", "pack.models.zimage",
                     ("svdq_linear.weight = None", "svdq_linear.weight_function, svdq_linear.bias_function = [], []"))
    assert mend("svdq_lowvram", mended).verdict == "not-needed"
