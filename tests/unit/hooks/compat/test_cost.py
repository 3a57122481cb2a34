"""A repair that has nothing to do looks at nothing: counted in look-ups of modules and state dicts, not in time."""

import pytest
import torch

from qpatch.hooks.compat import calls


class Counting(torch.nn.Module):
    """A model that counts how often somebody walks over it."""

    def __init__(self, layers):
        super().__init__()
        self.walks = 0
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(layers))

    def named_modules(self, *args, **kwargs):
        self.walks += 1
        return super().named_modules(*args, **kwargs)

    def modules(self):
        self.walks += 1
        return super().modules()

    def state_dict(self, *args, **kwargs):
        self.walks += 1
        return super().state_dict(*args, **kwargs)

    @property
    def diffusion_model(self):
        return self

    def to_safely(self, device):
        return self


@pytest.fixture
def patchers(core, standin, mend):
    modules = [standin("compat/zimage_patcher.py", "pack.model_patcher.zimage"),
               standin("compat/common_patcher.py", "pack.model_patcher.common")]
    mend("patcher_calls", modules[0])
    mend("qwen_moves", modules[1])
    mend("quant_keys", core.patcher)
    mend("quant_parameter", core.patcher)
    return modules[0].ZImageModelPatcher, modules[1].NunchakuModelPatcher


@pytest.mark.parametrize("layers", [1, 300])
def test_loading_and_letting_go_walk_over_no_module(patchers, layers):
    for cls in patchers:
        patcher = cls(Counting(layers))
        for _ in range(10):
            patcher.load("cpu")
            patcher.clone()
            patcher.detach(unpatch_all=False)
        patcher.detach()
        assert patcher.model.walks == 0, cls


@pytest.mark.parametrize("layers", [1, 300])
def test_listing_keys_of_an_unquantized_model_reads_its_state_dict_once(core, patchers, layers):
    patcher = core.patcher.ModelPatcher(Counting(layers))
    assert len(patcher.get_key_patches()) == 2 * layers
    assert patcher.model.walks == 1


def test_adding_a_lora_asks_for_as_many_products_as_it_has_patches(core, mend):
    mend("lora_shape", core.lora)
    mend("original_weights", core.lora)
    asked = []

    class Adapter:
        weights = ()

        def calculate_weight(self, weight, key, strength):
            asked.append(key)
            return weight

    core.lora.calculate_weight([(1.0, Adapter(), 1.0, None, None)] * 5, torch.zeros(2, 2), "k")
    assert asked == ["k"] * 5


def test_a_model_is_walked_over_once_when_it_is_built_and_not_when_it_is_loaded(comfy):
    from functools import partial

    from qpatch.hooks.compat.plain_dtype import cast, declared

    model = Counting(100)
    hook = partial(cast, declared(model))
    assert model.walks == 1
    for _ in range(10):
        hook({"layers.0.weight": torch.zeros(2, 2)}, "")
    assert model.walks == 1


def test_a_method_that_is_called_at_each_step_has_its_signature_read_once(monkeypatch):
    asked, accepts = [], calls.accepts
    monkeypatch.setattr(calls, "accepts", lambda function, name: (asked.append(name), accepts(function, name))[1])
    forward = calls.fit(lambda self, states, temb: states, lambda self, states, temb, transformer_options=None: states)
    for _ in range(100):
        assert forward(None, states=1, temb=2, transformer_options=None) == 1
    assert sorted(asked) == ["states", "temb", "transformer_options"]
