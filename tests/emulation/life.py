"""The life of LoRAs in ComfyUI: clones that take turns, loading and unloading, what is computed when. Any world."""

import gc

import pytest
import torch

from qpatch import lora
from qpatch.lora import planning

from . import effect, walk, world
from .cases import Restoring, load
from .effect import FAMILIES, TOLERANCE, example, only
from .walk import Walker


def factors(pair) -> list[torch.Tensor]:
    """The very objects that stand in the model, quantized layers and plain ones."""
    return [parameter for _, parameter in pair.model.named_parameters()] + list(pair.model.buffers())


def same(one: list, other: list) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other))


def unload_all():
    import comfy.model_management

    comfy.model_management.unload_all_models()


class LifeCases(Restoring):
    """Needs fixtures ``pairs`` (see cases.Restoring) and ``count_calls``."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_each_clone_that_runs_gets_its_own_loras_and_only_those(self, pairs, family):
        pair = pairs(family)
        first, second = example(family, seed=1), example(family, "musubi", seed=2)
        one, other = load(pair.quantized, first, 0.02), load(pair.quantized, second, 0.02)
        both = load(one, second, 0.01)
        wanted = {one: [(first, 0.02)], other: [(second, 0.02)], both: [(first, 0.02), (second, 0.01)]}
        for patcher in (one, other, both, one, both, other):
            assert pair.error(patcher, wanted[patcher]) < TOLERANCE
            assert torch.equal(pair.run(pair.quantized), pair.base)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_running_again_without_a_change_computes_nothing(self, pairs, family, monkeypatch):
        pair = pairs(family)
        patcher = load(pair.quantized, example(family), 0.02)
        output, standing = pair.run(patcher), factors(pair)
        monkeypatch.setattr(planning, "plan", _must_not_be_called)
        for _ in range(2):
            assert torch.equal(pair.run(patcher), output)
            assert same(factors(pair), standing)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_node_that_runs_again_with_another_strength_only_rescales(self, pairs, family):
        pair, file = pairs(family), example(family)
        patcher = load(pair.quantized, file, 0.02)
        output, standing = pair.run(patcher), factors(pair)
        for strength in (0.01, 0.02):
            # The old output of the node is dropped before the new one runs.
            patcher = None
            gc.collect()
            patcher = load(pair.quantized, file, strength)
            assert pair.error(patcher, [(file, strength)]) < TOLERANCE
            assert same(factors(pair), standing)
        assert torch.equal(pair.run(patcher), output)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_clone_made_before_any_lora_runs_bare_while_the_lora_clone_lives(self, pairs, family):
        pair = pairs(family)
        early = pair.quantized.clone()
        patcher = load(pair.quantized, example(family), 0.02)
        pair.run(patcher)
        assert torch.equal(pair.run(early), pair.base)
        late = pair.quantized.clone()
        pair.run(patcher)
        assert torch.equal(pair.run(late), pair.base)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_base_is_back_when_the_running_clone_is_deleted(self, pairs, family):
        pair = pairs(family)
        patcher = load(pair.quantized, example(family), 0.02)
        pair.run(patcher)
        assert lora.composed(pair.model)
        del patcher
        gc.collect()
        assert not lora.composed(pair.model)
        assert torch.equal(world.evaluate(pair.quantized, pair.inputs), pair.base)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_clone_of_the_running_patcher_that_comes_and_goes_takes_nothing_with_it(self, pairs, family):
        pair, file = pairs(family), example(family)
        patcher = load(pair.quantized, file, 0.02)
        output = pair.run(patcher)
        for change in (lambda one: one.clone(), lambda one: load(one, example(family, seed=3), 0.02)):
            passing = change(patcher)
            assert torch.equal(world.evaluate(patcher, pair.inputs), output)
            assert torch.equal(pair.run(pair.quantized), pair.base)
            pair.run(patcher)
            del passing
            gc.collect()
            assert torch.equal(world.evaluate(patcher, pair.inputs), output)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_unloading_and_loading_again_brings_the_same_loras(self, pairs, family):
        pair = pairs(family)
        patcher = load(pair.quantized, example(family), 0.02)
        output = pair.run(patcher)
        for _ in range(2):
            unload_all()
            assert not lora.composed(pair.model)
            assert torch.equal(pair.run(patcher), output)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_partial_unloading_leaves_the_loras_in_effect(self, pairs, family):
        pair = pairs(family)
        patcher = load(pair.quantized, example(family), 0.02)
        output = pair.run(patcher)
        patcher.partially_unload(torch.device("cpu"), 1000)
        assert torch.equal(world.evaluate(patcher, pair.inputs), output)
        unload_all()

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_model_that_is_loaded_in_part_has_its_loras_in_effect(self, pairs, family):
        pair, file = pairs(family), example(family)
        patcher = load(pair.quantized, file, 0.02)
        unload_all()
        patcher.partially_load(torch.device("cpu"), 4_000_000)
        got = world.evaluate(patcher, pair.inputs)
        patcher.detach()
        with effect.dense(pair.plain, [(file, 0.02)]):
            wanted = pair.run(pair.plain)
        assert effect.mismatch(got, pair.base, wanted, pair.plain_base) < TOLERANCE

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_original_patcher_is_not_changed_by_loading_a_lora(self, pairs, family):
        pair = pairs(family)
        before = {key: dict(value) for key, value in vars(pair.quantized).items() if isinstance(value, dict)}
        load(pair.quantized, example(family), 0.02)
        assert {key: dict(value) for key, value in vars(pair.quantized).items() if isinstance(value, dict)} == before

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_change_of_loras_does_not_make_comfyui_load_the_weights_again(self, pairs, family):
        pair = pairs(family)
        patcher = load(load(pair.quantized, example(family), 0.02), example(family, seed=1), 0.02)
        assert patcher.patches_uuid == pair.quantized.patches_uuid

    @pytest.mark.parametrize("family", FAMILIES)
    def test_without_a_lora_nothing_of_the_hook_runs_in_a_step(self, pairs, family, count_calls):
        pair = pairs(family)
        pair.run(pair.quantized)
        assert count_calls(lambda: world.evaluate(pair.quantized, pair.inputs)) == []

    @pytest.mark.parametrize("family", FAMILIES)
    def test_with_a_lora_only_the_branch_of_modulation_layers_runs_in_a_step(self, pairs, family, count_calls):
        pair = pairs(family)
        patcher = load(pair.quantized, example(family), 0.02)
        pair.run(patcher)
        calls = count_calls(lambda: world.evaluate(patcher, pair.inputs))
        # Two blocks with two modulation layers each; Z-Image has none that is quantized.
        assert len(calls) == (4 if family == "qwen-image" else 0), calls

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_model_that_somebody_reset_is_composed_again_at_the_next_run(self, pairs, family):
        pair = pairs(family)
        patcher = load(pair.quantized, example(family), 0.02)
        output = pair.run(patcher)
        lora.reset(pair.model)
        assert torch.equal(world.evaluate(patcher, pair.inputs), pair.base)
        assert torch.equal(pair.run(patcher), output)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_patchers_that_a_node_patches_by_hand_one_after_the_other_each_get_their_own_list(self, pairs, family):
        pair, first, second = pairs(family), example(family, seed=1), example(family, seed=2)
        one, other = load(pair.quantized, first, 0.02), load(pair.quantized, second, 0.02)
        none = load(pair.quantized, example("qwen-image" if family == "z-image" else "z-image"), 0.02)
        wanted = {one: pair.run(one), other: pair.run(other), none: pair.base}
        for patcher in (one, other, none, other):
            patcher.patch_model(torch.device("cpu"))
            assert torch.equal(world.evaluate(patcher, pair.inputs), wanted[patcher])
        for patcher in (one, other, none):
            patcher.unpatch_model(torch.device("cpu"))

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_random_walk_over_clones_runs_and_unloads_never_loses_track(self, pairs, family):
        from hypothesis import HealthCheck, settings
        from hypothesis.stateful import run_state_machine_as_test

        twin = pairs(family, twin=True)
        machine = type("Walk", (Walker,), {"pair": pairs(family), "twin": twin, "files": [
            example(family, seed=1), only(example(family, "musubi", seed=2), "[q]", "w2", "img_mod.1", "[w3]"),
            example(family, "simpletuner lycoris", "lokr", seed=3)]})
        run_state_machine_as_test(machine, settings=settings(
            max_examples=walk.EXAMPLES, stateful_step_count=walk.STEPS, deadline=None, derandomize=True,
            suppress_health_check=list(HealthCheck)))


def _must_not_be_called(*_, **__):
    raise AssertionError("a composition was planned anew")
