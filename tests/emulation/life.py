"""The life of LoRAs in ComfyUI: clones that take turns, unloading, schedules, other ways in. Any world."""

import gc
import logging

import pytest
import torch

from qpatch import lora
from qpatch.lora import planning, progress

from . import effect, walk, world
from .cases import load
from .effect import FAMILIES, TOLERANCE, example, only
from .walk import Walker


def factors(pair) -> list[torch.Tensor]:
    """The very objects that stand in the model, quantized layers and plain ones."""
    return [parameter for _, parameter in pair.model.named_parameters()] + list(pair.model.buffers())


def same(one: list, other: list) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other))


def scheduled(file, strength: float):
    """A conditioning hook with the LoRA ``file``, as CreateHookLora makes it."""
    import comfy.hooks

    return comfy.hooks.create_hook_lora(file.tensors, strength, 0.0)


def unload_all():
    import comfy.model_management

    comfy.model_management.unload_all_models()


class LifeCases:
    """Needs a fixture ``pairs`` (see cases.Cases) and ``register(patcher, hooks)``, which a sampler does before it loads."""

    @pytest.fixture(autouse=True)
    def nothing_stays(self, pairs):
        yield
        gc.collect()
        for pair in pairs.used():
            assert pair.bare()

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
    def test_a_scheduled_lora_follows_its_hook_from_step_to_step(self, pairs, family, register):
        pair = pairs(family)
        always, timed = example(family, seed=1), example(family, "musubi", seed=2)
        patcher = load(pair.quantized, always, 0.02)
        group = scheduled(timed, 0.02)
        register(patcher, group)
        pair.run(patcher)
        outputs = []
        for hooks in (None, group, None, group):
            patcher.apply_hooks(hooks)
            outputs.append(world.evaluate(patcher, pair.inputs))
        assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])
        for output, files in ((outputs[0], [(always, 0.02)]), (outputs[1], [(always, 0.02), (timed, 0.02)])):
            with effect.dense(pair.plain, files):
                assert effect.mismatch(output, pair.base, pair.run(pair.plain), pair.plain_base) < TOLERANCE
        patcher.cleanup()
        patcher.restore_hook_patches()
        assert pair.error(patcher, [(always, 0.02)]) < TOLERANCE

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_bare_patcher_takes_a_scheduled_lora_and_is_bare_afterwards(self, pairs, family, register):
        pair, file = pairs(family), example(family)
        patcher, group = pair.quantized.clone(), scheduled(file, 0.02)
        for _ in range(2):
            register(patcher, group)
            pair.run(patcher)
            assert torch.equal(world.evaluate(patcher, pair.inputs), pair.base)
            patcher.apply_hooks(group)
            got = world.evaluate(patcher, pair.inputs)
            with effect.dense(pair.plain, [(file, 0.02)]):
                assert effect.mismatch(got, pair.base, pair.run(pair.plain), pair.plain_base) < TOLERANCE
            patcher.cleanup()
            patcher.restore_hook_patches()
            assert torch.equal(pair.run(patcher), pair.base)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_nodes_that_parse_a_lora_and_add_it_layer_by_layer_are_heard(self, pairs, family):
        import comfy.lora

        pair, file = pairs(family), example(family)
        loaded = comfy.lora.load_lora(file.tensors, comfy.lora.model_lora_keys_unet(pair.quantized.model, {}))
        patcher = pair.quantized.clone()
        for number, (key, patch) in enumerate(loaded.items()):
            taken = patcher.add_patches({key: patch}, 0.02 if number % 2 else 0.01)
            assert taken == [key]
        first = [target for number, target in enumerate(_targets(loaded, file)) if number % 2]
        other = [target for number, target in enumerate(_targets(loaded, file)) if not number % 2]
        assert pair.error(patcher, [(_part(file, first), 0.02), (_part(file, other), 0.01)]) < TOLERANCE

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_key_map_names_every_quantized_layer_of_a_file(self, pairs, family):
        import comfy.lora

        names = comfy.lora.model_lora_keys_unet(pairs(family).quantized.model, {})
        for producer in ("ai-toolkit", "onetrainer kohya", "simpletuner lycoris", "diffusion-pipe", "onetrainer original"):
            file = example(family, producer, singles=False)
            stems = {key.rpartition(".lora_")[0] for key in file.tensors if ".lora_" in key}
            # adaLN and what is not quantized is ComfyUI's own business.
            missing = {stem for stem in stems if stem not in names and "adaLN" not in stem}
            assert not missing, (producer, sorted(missing)[:3])

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_text_encoder_s_part_takes_comfyui_s_own_path(self, pairs, family, clip):
        pair, file = pairs(family), example(family)
        file.tensors.update(clip.tensors)
        patcher, new_clip = load(pair.quantized, file, 0.02, clip=clip)
        assert clip.given == [sorted(clip.tensors)] and new_clip is not clip
        for key in clip.tensors:
            del file.tensors[key]
        assert pair.error(patcher, [(file, 0.02)]) < TOLERANCE

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_lora_for_another_model_is_refused_in_one_line_and_the_workflow_goes_on(self, pairs, family, caplog):
        pair = pairs(family)
        other = example("z-image" if family == "qwen-image" else "qwen-image", singles=False)
        with caplog.at_level(logging.INFO, logger="qpatch"):
            patcher = load(pair.quantized, other, 1.0)
            assert torch.equal(pair.run(patcher), pair.base)
        lines = [record.getMessage() for record in caplog.records if record.name == "qpatch"]
        assert len(lines) == 1 and "lora #1" in lines[0] and "another model" in lines[0], lines

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_log_names_the_file_its_strength_and_its_layers_once(self, pairs, family, caplog, tmp_path):
        import comfy.utils

        pair, file = pairs(family), example(family)
        file.tensors["diffusion_model.nowhere.lora_A.weight"] = torch.zeros(1, 1)
        path = file.write(tmp_path / "style.safetensors")
        tensors = comfy.utils.load_torch_file(str(path), safe_load=True)
        with caplog.at_level(logging.INFO, logger="qpatch"):
            patcher = load(pair.quantized, world.Tensors(tensors), 0.02)
            pair.run(patcher), pair.run(patcher)
        lines = [record.getMessage() for record in caplog.records if record.name == "qpatch"]
        count = len(file.layers)
        assert lines[0] == f"qpatch: style.safetensors 0.02 -> {count}/{count + 1} layers"
        assert len(lines) == 2 and "style.safetensors: 1 keys without effect" in lines[1] and "nowhere" in lines[1], lines

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_model_that_somebody_reset_is_composed_again_at_the_next_run(self, pairs, family):
        pair = pairs(family)
        patcher = load(pair.quantized, example(family), 0.02)
        output = pair.run(patcher)
        lora.reset(pair.model)
        assert torch.equal(world.evaluate(patcher, pair.inputs), pair.base)
        assert torch.equal(pair.run(patcher), output)

    def test_a_composition_that_takes_its_time_moves_comfyui_s_progress_bar(self, pairs, monkeypatch):
        import comfy.utils

        seen = []

        class Bar:
            def __init__(self, total, *_, **__):
                self.total = total

            def update_absolute(self, value, total=None, preview=None):
                seen.append((value, total))

        monkeypatch.setattr(comfy.utils, "ProgressBar", Bar)
        monkeypatch.setattr(progress, "_DELAY", 0)
        pair = pairs("z-image")
        pair.run(load(pair.quantized, example("z-image"), 0.02))
        assert seen[-1][0] == seen[-1][1] > 10
        assert seen == sorted(seen)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_loras_of_a_stack_still_apply_when_one_holds_nan(self, pairs, family, caplog):
        pair, good, bad = pairs(family), example(family), example(family, "musubi", seed=1)
        next(tensor for key, tensor in bad.tensors.items() if key.endswith("lora_up.weight")).view(-1)[0] = float("nan")
        patcher = load(load(pair.quantized, bad, 0.02), good, 0.02)
        with caplog.at_level(logging.INFO, logger="qpatch"):
            assert pair.error(patcher, [(good, 0.02)]) < TOLERANCE
        told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING and record.name == "qpatch"]
        assert len(told) == 1 and "lora #1" in told[0] and "NaN" in told[0], told

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


def _targets(loaded, file) -> list[str]:
    """For each parsed patch the layer of ``file`` that its tensors come from."""
    owners = {id(tensor): target for target, sample in file.layers.items() for tensor in sample.tensors.values()}
    return [owners[id(patch.weights[0])] for patch in loaded.values()]


def _part(file, targets):
    return only(file, *targets)
