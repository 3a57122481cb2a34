"""What ComfyUI's nodes that merge, extract and save do with a model that has LoRAs on. Any world."""

import contextlib
import logging

import pytest
import torch

from . import effect, world
from .cases import Restoring, load
from .effect import FAMILIES, TOLERANCE, example

#: An unquantized layer with a bias, of each family.
LAYER = {"qwen-image": "img_in", "z-image": "x_embedder"}


def merged(one, other, ratio: float, keep: float):
    """A clone of ``one`` with ``keep`` of its own weights and ``ratio`` of ``other``'s, as merging nodes make it."""
    clone = one.clone()
    for key, patches in other.get_key_patches("diffusion_model.").items():
        clone.add_patches({key: patches}, ratio, keep)
    return clone


def subtracted(one, other):
    return merged(one, other, -1.0, 1.0)


def read(patcher) -> dict[str, torch.Tensor]:
    """The differences in a subtracted model, as ComfyUI's LoRA extraction reads them."""
    found = {}
    for key, value in patcher.model_state_dict("diffusion_model.").items():
        stem, _, parameter = key.rpartition(".")
        module = patcher.model.get_submodule(stem)
        if parameter not in ("weight", "bias"):
            continue
        if hasattr(module, "comfy_cast_weights") and not getattr(module, "comfy_patched_weights", False):
            value = patcher.patch_weight_to_device(key, torch.device("cpu"), return_weight=True)
        found[key.removeprefix("diffusion_model.")] = value.detach().clone()
    return found


def plain(pair, key: str) -> bool:
    """Whether ``key`` of the state dict is part of an unquantized layer of the quantized model."""
    return not hasattr(pair.model.get_submodule(key.rpartition(".")[0]), "qweight")


def plain_changes(pair, file, strength: float) -> dict[str, torch.Tensor]:
    """{key: change} that ``file`` makes to the unquantized layers, worked out in float64."""
    weights = pair.plain.model.diffusion_model.state_dict()
    before = {key: value.clone() for key, value in weights.items()}
    with effect.dense(pair.plain, [(file, strength)]):
        return {key: value - before[key] for key, value in weights.items() if key in pair.state}


@contextlib.contextmanager
def doubled(pair):
    """The same unquantized layer twice as large in both models of ``pair``."""
    layers = [getattr(patcher.model.diffusion_model, LAYER[pair.family]) for patcher in (pair.plain, pair.quantized)]
    values = [parameter for layer in layers for parameter in layer.parameters()]
    for value in values:
        value.data *= 2
    try:
        yield
    finally:
        for value in values:
            value.data /= 2


class MergingCases(Restoring):
    """Needs a fixture ``pairs`` (see cases.Restoring)."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_merging_changes_the_unquantized_layers_as_on_the_unquantized_model(self, pairs, family, caplog):
        pair, twin, file = pairs(family), pairs(family, twin=True), example(family)
        patcher = load(pair.quantized, file, 0.02)
        vars(twin.quantized.model).pop("qpatch_told_of_merging", None)
        with doubled(twin), caplog.at_level(logging.WARNING, logger="qpatch"):
            got = pair.run(merged(pair.quantized, twin.quantized, 0.5, 0.5))
            wanted = pair.run(merged(pair.plain, twin.plain, 0.5, 0.5))
            both = pair.run(merged(patcher, twin.quantized, 0.5, 0.5))
            pair.run(pair.plain)
            with effect.dense(pair.plain, [(file, 0.02)]):
                # A merge leaves the LoRAs of the model that it changes at their strength.
                half = getattr(pair.plain.model.diffusion_model, LAYER[family])
                half.weight.data += 0.5 * half_of(twin, family)
                half.bias.data *= 1.5
                wanted_both = pair.run(pair.plain)
            assert torch.equal(pair.run(pair.quantized), pair.base)
        assert effect.mismatch(got, pair.base, wanted, pair.plain_base) < TOLERANCE
        assert effect.mismatch(both, pair.base, wanted_both, pair.plain_base) < TOLERANCE
        assert caplog.text.count("quantized layers") == caplog.text.count("no weight that could be merged") == 1

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("how", ["whole", "in part"])
    def test_subtracting_the_model_from_itself_with_a_lora_leaves_the_lora_of_the_unquantized_layers(
            self, pairs, family, how):
        import comfy.model_management as management

        pair, file = pairs(family), example(family)
        patcher = load(pair.quantized, file, 0.02)
        pair.run(patcher)
        difference = subtracted(patcher, pair.quantized)
        if how == "whole":
            management.load_models_gpu([difference])
        else:
            management.unload_all_models()
            difference.partially_load(torch.device("cpu"), 4_000_000)
        found, wanted = read(difference), plain_changes(pair, file, 0.02)
        difference.detach()
        assert found and all(plain(pair, key) for key in found)
        for key, value in found.items():
            assert torch.allclose(value.float(), wanted[key], atol=0.01 * wanted[key].abs().max().item() + 1e-6), key
        assert found[LAYER[family] + ".weight"].norm() > 0.1

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_patcher_gives_away_its_own_weights_whichever_clone_is_loaded(self, pairs, family):
        import comfy.lora

        pair, file = pairs(family), example(family)
        patcher, key = load(pair.quantized, file, 0.02), f"diffusion_model.{LAYER[family]}.weight"
        base, change = pair.state[f"{LAYER[family]}.weight"], plain_changes(pair, file, 0.02)[f"{LAYER[family]}.weight"]
        for loaded in (pair.quantized, patcher):
            output = pair.run(loaded)
            for one, wanted in ((pair.quantized, base), (patcher, base + change)):
                (weight, _), *patches = one.get_key_patches()[key]
                assert torch.equal(weight, base)
                assert torch.allclose(comfy.lora.calculate_weight(patches, base.clone(), key), wanted, atol=1e-3)
            asked = patcher.patch_weight_to_device(key, torch.device("cpu"), return_weight=True)
            assert torch.allclose(asked, base + change, atol=1e-3)
            assert torch.equal(world.evaluate(loaded, pair.inputs), output)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_model_is_saved_with_its_loras_in_it_and_a_word_on_what_the_file_is_worth(self, pairs, family, caplog):
        pair, file = pairs(family), example(family)
        patcher = load(pair.quantized, file, 0.02)
        pair.run(patcher)
        with caplog.at_level(logging.WARNING, logger="qpatch"):
            saved = patcher.state_dict_for_saving()
        assert "keep the model's own file" in caplog.text
        name = next(name for name in saved if name.endswith("proj_down"))
        ours = next(key for key in pair.state if name.endswith(key) and key.endswith("proj_down"))
        assert saved[name].shape[1] > pair.state[ours].shape[1]
        caplog.clear()
        pair.run(pair.quantized)
        pair.quantized.state_dict_for_saving()
        assert not caplog.text


def half_of(twin, family):
    """The weight of the changed layer of the unquantized twin, before it was doubled."""
    return getattr(twin.plain.model.diffusion_model, LAYER[family]).weight.data / 2
