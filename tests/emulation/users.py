"""What people do in a workflow without thinking of it: loaders in any order, files twice, files of the wrong kind."""

import gc
import logging

import pytest
import torch

from qpatch import lora
from qpatch.lora import planning

from .cases import Restoring, load
from .effect import FAMILIES, TOLERANCE, example, only
from .world import Tensors


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "qpatch"]


class UserCases(Restoring):
    """Needs fixtures ``pairs`` (see cases.Restoring) and ``clip``."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_two_loaders_in_either_order_do_the_same(self, pairs, family):
        pair = pairs(family)
        one, other = example(family, seed=1), example(family, "musubi", seed=2)
        patchers = [load(load(pair.quantized, first, a), second, b)
                    for first, a, second, b in ((one, 0.02, other, -0.01), (other, -0.01, one, 0.02))]
        for patcher in patchers:
            assert pair.error(patcher, [(one, 0.02), (other, -0.01)]) < TOLERANCE

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_lora_on_a_clone_and_then_one_on_the_original_stay_apart(self, pairs, family):
        pair = pairs(family)
        one, other = example(family, seed=1), example(family, seed=2)
        on_the_clone = load(pair.quantized.clone(), one, 0.02)
        pair.run(on_the_clone)
        on_the_original = load(pair.quantized, other, 0.02)
        for _ in range(2):
            assert pair.error(on_the_original, [(other, 0.02)]) < TOLERANCE
            assert pair.error(on_the_clone, [(one, 0.02)]) < TOLERANCE
        assert torch.equal(pair.run(pair.quantized), pair.base)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_file_that_is_loaded_twice_counts_twice(self, pairs, family):
        pair, file = pairs(family), example(family)
        again = Tensors({key: tensor.clone() for key, tensor in file.tensors.items()})
        for second in (file, again):
            twice = load(load(pair.quantized, file, 0.01), second, 0.02)
            assert pair.error(twice, [(file, 0.03)]) < TOLERANCE
        opposite = load(load(pair.quantized, file, 0.02), file, -0.02)
        assert torch.allclose(pair.run(opposite), pair.base, atol=1e-3)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_chain_with_a_loader_at_strength_zero_in_it_is_the_chain_without(self, pairs, family):
        pair, file = pairs(family), example(family)
        none_before, none_after = example(family, seed=3), example(family, seed=4)
        patcher = load(load(load(pair.quantized, none_before, 0.0), file, 0.02), none_after, 0.0)
        assert torch.equal(pair.run(patcher), pair.run(load(pair.quantized, file, 0.02)))

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("with_clip", [True, False])
    def test_a_file_for_the_text_encoder_alone_leaves_the_model_bare(self, pairs, family, clip, with_clip, caplog):
        pair, file = pairs(family), Tensors(dict(clip.tensors))
        with caplog.at_level(logging.INFO, logger="qpatch"):
            patcher = load(pair.quantized, file, 1.0, clip=clip if with_clip else None)
            patcher = patcher[0] if with_clip else patcher
            assert torch.equal(pair.run(patcher), pair.base) and not lora.composed(pair.model)
        assert clip.given == ([sorted(clip.tensors)] if with_clip else [])
        told = lines(caplog)
        assert not told if with_clip else len(told) == 1 and "text encoder" in told[0], told

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_file_with_nothing_in_it_is_named_and_does_nothing(self, pairs, family, caplog):
        pair = pairs(family)
        with caplog.at_level(logging.INFO, logger="qpatch"):
            assert torch.equal(pair.run(load(pair.quantized, Tensors({}), 1.0)), pair.base)
        assert len(lines(caplog)) == 1 and "lora #1" in lines(caplog)[0], lines(caplog)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_workflow_that_is_queued_again_with_cached_loaders_computes_nothing(self, pairs, family, monkeypatch):
        import comfy.model_management as management

        pair, file = pairs(family), example(family)
        cached = load(load(pair.quantized, file, 0.02), only(example(family, seed=2), "[q]"), 0.02)
        first = pair.run(cached)
        with monkeypatch.context() as patch:
            patch.setattr(planning, "plan", _must_not_be_called)
            # The sampler's clone goes after each run, and another model may have taken the memory in between.
            for between in (gc.collect, management.unload_all_models, lambda: pair.run(pair.quantized)):
                between()
                sampling = cached.clone()
                assert torch.equal(pair.run(sampling), first)
                del sampling
        assert torch.equal(pair.run(cached), first)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_good_file_acts_beside_one_for_another_model_and_an_empty_one(self, pairs, family, caplog):
        pair, file = pairs(family), example(family)
        other = example("z-image" if family == "qwen-image" else "qwen-image", singles=False)
        patcher = load(load(load(pair.quantized, other, 1.0), Tensors({}), 1.0), file, 0.02)
        assert pair.error(patcher, [(file, 0.02)]) < TOLERANCE


def _must_not_be_called(*_, **__):
    raise AssertionError("a composition was planned anew")
