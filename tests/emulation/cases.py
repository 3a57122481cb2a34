"""What must hold of LoRAs on Nunchaku models, in any world: tests/e2e runs these on stand-ins, tests/contract on checkouts."""

import pytest
import torch

from . import effect
from .effect import FAMILIES, TOLERANCE, example, only

#: Kinds with an exact low-rank form, and the strength that makes each a visible change of a tiny model.
KINDS = {"lora": 0.02, "lora_conv": 0.02, "lokr": 0.02, "lokr_w2_whole": 0.02, "lokr_both": 0.01, "loha": 0.005}
#: Kinds that take part of the weight itself with them.
REBASED = {"dora": 0.3, "glora": 0.02}
PRODUCERS = ("musubi", "musubi other", "ai-toolkit", "onetrainer legacy", "onetrainer kohya", "diffusion-pipe", "diffsynth",
             "simpletuner lycoris", "peft", "lightning", "videox-fun", "lora_transformer", "invokeai", "old diffusers")


def load(patcher, file, strength=1.0, clip=None, loader="load_lora_for_models"):
    """What a LoRA node does; the new patcher (and the new clip, when one is given)."""
    import comfy.sd

    new, new_clip = getattr(comfy.sd, loader)(patcher, clip, file.tensors, strength, strength)
    return new if clip is None else (new, new_clip)


class Cases:
    """Needs a fixture ``pairs``: a callable (family, **options) -> effect.Pair, cached."""

    @pytest.fixture(autouse=True)
    def nothing_stays(self, pairs):
        yield
        for pair in pairs.made():
            assert pair.bare()

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
