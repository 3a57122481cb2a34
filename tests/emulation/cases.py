"""The effect of LoRAs on Nunchaku models: tests/e2e runs these cases on stand-ins, tests/contract on checkouts."""

import gc

import pytest
import torch

from .effect import FAMILIES, TOLERANCE, example, only
from .world import Tensors

#: Kinds with an exact low-rank form, and the strength that makes each a visible change of a tiny model.
KINDS = {"lora": 0.02, "lora_conv": 0.02, "lokr": 0.02, "lokr_w2_whole": 0.02, "lokr_both": 0.01, "loha": 0.005}
#: Kinds that take part of the weight itself with them, or have no small rank: right within the rank budget.
FULL_RANK = {"lokr_full": 0.02, "glora": 0.3, "glora_old": 0.3, "dora": 0.3, "dora_columns": 0.3, "dora_lokr": 0.3,
             "oft": 0.3, "boft": 0.3, "ia3_rows": 0.3, "ia3_columns": 0.3, "diff": 0.3, "diff_b": 0.3}
PRODUCERS = ("musubi", "musubi other", "ai-toolkit", "onetrainer legacy", "onetrainer kohya", "diffusion-pipe",
             "diffsynth", "simpletuner lycoris", "peft", "lightning", "videox-fun", "lora_transformer", "invokeai",
             "old diffusers")


def load(patcher, file, strength=1.0, clip=None, loader="load_lora_for_models"):
    """What a LoRA node does; the new patcher (and the new clip, when one is given)."""
    import comfy.sd

    new, new_clip = getattr(comfy.sd, loader)(patcher, clip, file.tensors, strength, strength)
    return new if clip is None else (new, new_clip)


class Restoring:
    """Needs a fixture ``pairs``, an effect.Pairs. After each test every model it used is bitwise bare."""

    @pytest.fixture(autouse=True)
    def nothing_stays(self, pairs):
        yield
        gc.collect()
        for pair in pairs.used():
            assert pair.bare()


class Cases(Restoring):
    """The change that a LoRA makes to a model's output, for kinds, producers, components, stacks and strengths."""

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("precision", ["int4", "nvfp4"])
    def test_without_a_lora_the_quantized_model_gives_what_its_twin_gives(self, pairs, family, precision):
        pair = pairs(family, precision=precision)
        assert torch.allclose(pair.base, pair.plain_base, atol=1e-4)

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_an_adapter_changes_the_output_as_on_the_unquantized_model(self, pairs, family, kind):
        pair = pairs(family)
        producer = "musubi" if kind == "lora_conv" else "simpletuner lycoris"
        file, strength = example(family, producer, kind), KINDS[kind]
        assert pair.error(load(pair.quantized, file, strength), [(file, strength)]) < TOLERANCE

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("producer", PRODUCERS)
    def test_a_file_of_any_producer_takes_full_effect(self, pairs, family, producer):
        pair = pairs(family)
        file = example(family, producer)
        assert pair.error(load(pair.quantized, file, 0.02), [(file, 0.02)]) < TOLERANCE

    @pytest.mark.parametrize("family, parts", [
        ("qwen-image", ("to_qkv[q]",)), ("qwen-image", ("to_qkv[q]", "to_qkv[v]")),
        ("qwen-image", ("add_qkv_proj[k]",)),
        ("qwen-image", ("img_mod.1",)), ("qwen-image", ("txt_mod.1", "img_mlp.net.2")),
        ("qwen-image", ("proj_out", "img_in", "norm_out.linear")),
        ("z-image", ("qkv[q]", "qkv[v]")), ("z-image", ("w13[w1]",)), ("z-image", ("w13[w3]",)),
        ("z-image", ("qkv[k]", "w2")), ("z-image", ("adaLN_modulation.0",)),
        ("z-image", ("x_embedder", "final_layer.linear")),
    ])
    def test_a_file_with_some_components_changes_only_those(self, pairs, family, parts):
        pair, file = pairs(family), only(example(family), *parts)
        strength = 0.2 if any("mod" in part for part in parts) else 0.05
        assert pair.error(load(pair.quantized, file, strength), [(file, strength)]) < TOLERANCE

    @pytest.mark.parametrize("skip_refiners", [False, True])
    def test_the_refiners_of_z_image_are_reached_quantized_or_not(self, pairs, skip_refiners):
        pair = pairs("z-image", skip_refiners=skip_refiners)
        file = example("z-image")
        refiners = tuple(target for target in file.layers if "refiner" in target)
        file = only(file, *refiners)
        assert pair.error(load(pair.quantized, file, 0.05), [(file, 0.05)]) < TOLERANCE

    @pytest.mark.parametrize("family", FAMILIES)
    def test_components_with_ranks_and_alphas_of_their_own_keep_them(self, pairs, family):
        pair = pairs(family)
        endings = (("[q]", 2, 7.0), ("[k]", 5, 1.0), ("[v]", 16, None), ("[w1]", 3, 2.0), ("[w3]", 20, 9.0))
        files = [(only(example(family, "musubi", rank=rank, alpha=alpha, seed=seed), ending), 0.05)
                 for seed, (ending, rank, alpha) in enumerate(endings) if family == "z-image" or "w" not in ending]
        whole = {key: tensor for file, _ in files for key, tensor in file.tensors.items()}
        assert pair.error(load(pair.quantized, Tensors(whole), 0.05), files) < TOLERANCE

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_stack_of_files_adds_up_each_with_its_strength(self, pairs, family):
        pair = pairs(family)
        files = [(example(family, seed=1), 0.02),
                 (only(example(family, "musubi", seed=2), "[q]", "[w3]", "mlp.net.2"), -0.03),
                 (example(family, "simpletuner lycoris", "lokr", seed=3), 0.01)]
        patcher = pair.quantized
        for file, strength in files:
            patcher = load(patcher, file, strength)
        assert pair.error(patcher, files) < TOLERANCE

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("kind", ["dora", "oft"])
    def test_a_file_that_looks_at_the_weight_sees_what_those_before_it_made_of_it(self, pairs, family, kind,
                                                                                  monkeypatch):
        monkeypatch.setenv("QPATCH_MAX_RANK", "900")
        pair = pairs(family)
        first, looking = example(family, seed=1), example(family, "simpletuner lycoris", kind, seed=2)
        for strength in (0.02, 0.03):
            files = [(first, strength), (looking, 0.02 if kind == "dora" else 0.3), (first, 0.02)]
            patcher = pair.quantized
            for file, given in files:
                patcher = load(patcher, file, given)
            # Random magnitudes make the change of a DoRA several times the weight, and its rounding as large.
            assert pair.error(patcher, files) < 2 * TOLERANCE

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("strength", [-0.02, 0.003, 0.03])
    def test_the_strength_scales_the_change(self, pairs, family, strength):
        pair, file = pairs(family), example(family)
        assert pair.error(load(pair.quantized, file, strength), [(file, strength)]) < TOLERANCE

    @pytest.mark.parametrize("family", FAMILIES)
    def test_strength_zero_gives_the_base_exactly(self, pairs, family):
        pair = pairs(family)
        assert torch.equal(pair.run(load(pair.quantized, example(family), 0.0)), pair.base)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_bypass_loader_has_the_same_effect(self, pairs, family):
        pair, file = pairs(family), example(family)
        patcher = load(pair.quantized, file, 0.02, loader="load_bypass_lora_for_models")
        assert pair.error(patcher, [(file, 0.02)]) < TOLERANCE

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_file_in_which_every_layer_is_of_another_kind_takes_full_effect(self, pairs, family, monkeypatch):
        monkeypatch.setenv("QPATCH_MAX_RANK", "900")
        pair, kinds = pairs(family), [kind for kind in FULL_RANK if kind != "diff_b" or family == "qwen-image"]
        files, tensors = [], {}
        for place, kind in enumerate(kinds):
            file = example(family, "ai-toolkit" if kind == "diff_b" else "simpletuner lycoris", kind, seed=place)
            layers = [target for number, target in enumerate(file.layers) if number % len(kinds) == place]
            files.append((only(file, *layers, exact=True), 0.2))
            tensors.update(files[-1][0].tensors)
        assert pair.error(load(pair.quantized, Tensors(tensors), 0.2), files) < TOLERANCE
