"""What else people do with a model that has LoRAs on: offloading, compiling, patching its blocks. Any world."""

import torch

from . import effect, world
from .cases import Restoring, load
from .effect import TOLERANCE, example, only


class SurroundingCases(Restoring):
    """Needs a fixture ``pairs`` (see cases.Restoring)."""

    def test_cpu_offload_of_qwen_image_runs_every_block_with_its_own_loras(self, pairs, monkeypatch):
        pair = pairs("qwen-image", blocks=4)
        whole = example("qwen-image", blocks=4)
        other = example("qwen-image", "musubi", rank=20, seed=1, blocks=4)
        files = [(only(whole, *(target for target in whole.layers if ".1.attn" in target or ".3." in target)), 0.02),
                 (only(other, "0.img_mlp.net.2", "2.attn.to_qkv[k]"), 0.02)]
        patcher = load(load(pair.quantized, files[0][0], 0.02), files[1][0], 0.02)
        with monkeypatch.context() as patch:
            world.offload(pair.model, patch)
            for _ in range(2):
                assert pair.error(patcher, files) < TOLERANCE
                assert torch.equal(pair.run(pair.quantized), pair.base)
            pair.model.set_offload(False)

    def test_offload_that_is_switched_on_while_a_lora_is_in_is_right_too(self, pairs, monkeypatch):
        pair, file = pairs("qwen-image", blocks=4), example("qwen-image", blocks=4)
        patcher = load(pair.quantized, file, 0.02)
        pair.run(patcher)
        with monkeypatch.context() as patch:
            world.offload(pair.model, patch)
            assert pair.error(patcher, [(file, 0.02)]) < TOLERANCE
            assert torch.equal(pair.run(pair.quantized), pair.base)
            pair.model.set_offload(False)

    def test_a_compiled_model_follows_loras_that_come_change_and_go(self, pairs):
        import comfy.model_management

        pair = pairs("qwen-image", blocks=1)
        one = load(pair.quantized, example("qwen-image", seed=1, blocks=1), 0.02)
        other = load(pair.quantized, example("qwen-image", rank=20, seed=2, blocks=1), 0.02)
        wanted = {patcher: pair.run(patcher) for patcher in (one, other, pair.quantized)}
        compiled = torch.compile(pair.model, backend="eager")
        for patcher in (pair.quantized, one, other, one, pair.quantized):
            comfy.model_management.load_models_gpu([patcher])
            with torch.no_grad():
                got = compiled(**pair.inputs)
            assert torch.allclose(got, wanted[patcher], atol=1e-4)
        torch._dynamo.reset()

    def test_a_compiled_model_as_an_object_patch_gets_the_loras(self, pairs):
        pair = pairs("qwen-image", blocks=1)
        patcher = load(pair.quantized, example("qwen-image", blocks=1), 0.02)
        wanted = pair.run(patcher)
        patcher.object_patches["diffusion_model"] = torch.compile(pair.model, backend="eager")
        assert torch.allclose(pair.run(patcher), wanted, atol=1e-4)
        torch._dynamo.reset()
        # Loading another clone takes the object patch off.
        assert torch.equal(pair.run(pair.quantized), pair.base)

    def test_block_patches_and_controlnet_act_together_with_a_lora(self, pairs):
        pair, file = pairs("qwen-image"), example("qwen-image")
        residual = 0.3 * torch.randn(1, 16, 256, generator=torch.Generator().manual_seed(1))

        def halve_the_text(args, extra):
            out = extra["original_block"](args)
            return {**out, "txt": out["txt"] * 0.5}

        arguments = {**pair.inputs, "control": {"input": [None, residual]},
                     "transformer_options": {"patches_replace": {"dit": {("double_block", 0): halve_the_text}}}}
        bases = world.run(pair.quantized, arguments), world.run(pair.plain, arguments)
        assert not torch.allclose(bases[0], pair.base, atol=1e-2)
        got = world.run(load(pair.quantized, file, 0.02), arguments)
        with effect.dense(pair.plain, [(file, 0.02)]):
            assert effect.mismatch(got, bases[0], world.run(pair.plain, arguments), bases[1]) < TOLERANCE
