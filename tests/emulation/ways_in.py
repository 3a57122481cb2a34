"""How LoRAs get to a model in ComfyUI besides the plain node, and what the user is told. Any world."""

import logging

import pytest
import torch

from qpatch import lora
from qpatch.lora import progress

from . import effect, world
from .cases import Restoring, load
from .effect import FAMILIES, TOLERANCE, example, only


def scheduled(file, strength: float):
    """A conditioning hook with the LoRA ``file``, as CreateHookLora makes it."""
    import comfy.hooks

    return comfy.hooks.create_hook_lora(file.tensors, strength, 0.0)


class WaysInCases(Restoring):
    """Needs fixtures ``pairs`` (see cases.Restoring), ``clip``, and ``register(patcher, hooks)``.

    The last one does what a sampler does before it loads.
    """

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
            assert not lora.composed(pair.model)

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
        parts = [(only(file, *first, exact=True), 0.02), (only(file, *other, exact=True), 0.01)]
        assert pair.error(patcher, parts) < TOLERANCE

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_key_map_names_every_quantized_layer_of_a_file(self, pairs, family):
        import comfy.lora

        names = comfy.lora.model_lora_keys_unet(pairs(family).quantized.model, {})
        for producer in ("ai-toolkit", "onetrainer kohya", "simpletuner lycoris", "diffusion-pipe",
                         "onetrainer original"):
            file = example(family, producer, singles=False)
            stems = {key.rpartition(".lora_")[0] for key in file.tensors if ".lora_" in key}
            # adaLN and what is not quantized is ComfyUI's own business.
            missing = {stem for stem in stems if stem not in names and "adaLN" not in stem}
            assert not missing, (producer, sorted(missing)[:3])

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_text_encoder_s_part_takes_comfyui_s_own_path(self, pairs, family, clip, caplog):
        pair, file = pairs(family), example(family)
        file.tensors.update(clip.tensors)
        patcher, new_clip = load(pair.quantized, file, 0.02, clip=clip)
        # ComfyUI complains of each key that it does not know: it was given the text encoder's only.
        assert "not loaded" not in caplog.text.lower()
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
        assert len(lines) == 2, lines
        assert "style.safetensors: 1 keys without effect" in lines[1] and "nowhere" in lines[1]

    def test_a_composition_that_takes_its_time_moves_comfyui_s_progress_bar(self, pairs, monkeypatch):
        import comfy.utils

        bars = []

        class Bar:
            def __init__(self, total, *_, **__):
                bars.append([])

            def update_absolute(self, value, total=None, preview=None):
                bars[-1].append((value, total))

        monkeypatch.setattr(comfy.utils, "ProgressBar", Bar)
        monkeypatch.setattr(progress, "_DELAY", 0)
        pair = pairs("z-image")
        pair.run(load(pair.quantized, example("z-image"), 0.02))
        # One for reading the file, one for composing.
        for seen in bars:
            assert seen[-1][0] == seen[-1][1] > 10 and seen == sorted(seen)
        assert len(bars) == 2

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_loras_of_a_stack_still_apply_when_one_holds_nan(self, pairs, family, caplog):
        pair, good, bad = pairs(family), example(family), example(family, "musubi", seed=1)
        next(tensor for key, tensor in bad.tensors.items() if key.endswith("lora_up.weight")).view(-1)[0] = float("nan")
        patcher = load(load(pair.quantized, bad, 0.02), good, 0.02)
        with caplog.at_level(logging.INFO, logger="qpatch"):
            assert pair.error(patcher, [(good, 0.02)]) < TOLERANCE
        told = [record.getMessage() for record in caplog.records
                if record.levelno >= logging.WARNING and record.name == "qpatch"]
        assert len(told) == 1 and "lora #1" in told[0] and "NaN" in told[0], told


def _targets(loaded, file) -> list[str]:
    """For each parsed patch the layer of ``file`` that its tensors come from."""
    owners = {id(tensor): target for target, sample in file.layers.items() for tensor in sample.tensors.values()}
    return [owners[id(patch.weights[0])] for patch in loaded.values()]
