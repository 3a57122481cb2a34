"""The diffusers-class Z-Image of real nunchaku, kernels emulated: ``qpatch.lora`` alone, and ``qpatch.lora.shapes``."""

import importlib

import producers
import pytest
import torch
from emulation import effect, tiny, world

from qpatch import lora
from qpatch.lora import shapes

pytestmark = [pytest.mark.nunchaku,
              pytest.mark.skipif(world.missing() is not None, reason=f"{world.missing()} is not set")]

#: A third of the width times eight is the feed-forward's, which int4 wants in groups of 64.
CONFIG = dict(in_channels=16, dim=384, n_layers=2, n_refiner_layers=2, n_heads=3, n_kv_heads=3, cap_feat_dim=96,
              axes_dims=[32, 48, 48], axes_lens=[64, 64, 64])
DIMS = {"h": 384, "f": 1024, "m": 1536, "l": 64, "t": 96, "c": 256, "e": 1024}
#: Module of the Nunchaku class -> modules of diffusers' class whose rows it holds, in order.
SOURCES = {"attention.to_qkv": ("attention.to_q", "attention.to_k", "attention.to_v"),
           "feed_forward.net.0.proj": ("feed_forward.w3", "feed_forward.w1"),
           "feed_forward.net.2": ("feed_forward.w2",)}


class Models:
    """``plain``, diffusers' class, and ``quantized``, nunchaku's, with the same weights."""

    def __init__(self, skip_refiners: bool):
        world.enter(world.checkouts())
        self.theirs = importlib.import_module("nunchaku.models.transformers.transformer_zimage")
        self.plain = self.theirs.ZImageTransformer2DModel(**CONFIG)
        tiny.randomize(self.plain, seed=1)
        self.quantized = self.theirs.NunchakuZImageTransformer2DModel(**CONFIG)
        self.quantized._patch_model(skip_refiners=skip_refiners, precision="int4", rank=32, torch_dtype=torch.bfloat16)
        for seed, (name, layer) in enumerate(self.quantized.named_modules()):
            own = [key for key, _ in layer.named_parameters(recurse=False)]
            parts = [self.plain.get_submodule(source) for source in _sources(name)] if own and name else []
            if hasattr(layer, "qweight"):
                tiny._fill(layer, parts, seed)
                continue
            for key in own if name else ():
                value = torch.cat([part.get_parameter(key) for part in parts])
                setattr(layer, key, torch.nn.Parameter(value.clone(), requires_grad=False))
        for key in ("x_pad_token", "cap_pad_token"):
            setattr(self.quantized, key, torch.nn.Parameter(getattr(self.plain, key).clone(), requires_grad=False))
        # After it has loaded, the class moves to_qkv into its fused module.
        self.quantized.load_state_dict(self.quantized.state_dict())
        self.latent = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(3))
        self.texts = torch.randn(2, 32, 96, generator=torch.Generator().manual_seed(4))

    def run(self, model, count=1) -> torch.Tensor:
        """The model's answer to ``count`` images, as a latent [B, C, H, W]."""
        batch = shapes.to_batch(self.latent[:count], self.texts[:count])
        hooked = hasattr(model, "register_rope_hook")
        if hooked:
            model.register_rope_hook(self.theirs.NunchakuZImageRopeHook())
        try:
            with torch.no_grad():
                # Past the Nunchaku class's own forward, which passes arguments in the order of an older diffusers.
                forward = self.theirs.ZImageTransformer2DModel.forward
                out = forward(model, batch.images, torch.full((count,), 0.4), batch.texts)
        finally:
            if hooked:
                model.unregister_rope_hook()
        return batch.restore(out.sample)


def _sources(name: str) -> list[str]:
    for module, parts in SOURCES.items():
        if name.endswith(module):
            return [name.removesuffix(module) + part for part in parts]
    return [name]


@pytest.fixture(scope="module", params=[False, True], ids=["refiners quantized", "refiners plain"])
def models(request):
    return Models(request.param)


def add(models, file, strength):
    """``file`` in the plain model, in float64; its state before."""
    before = {key: value.clone() for key, value in models.plain.state_dict().items()}
    names = {**{f"attention.qkv[{part}]": f"attention.to_{part}" for part in "qkv"},
             "attention.out": "attention.to_out.0",
             **{f"feed_forward.w13[{part}]": f"feed_forward.{part}" for part in ("w1", "w3")},
             "x_embedder": "all_x_embedder.2-1", "final_layer.linear": "all_final_layer.2-1.linear",
             "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1"}
    for target, sample in file.layers.items():
        name = next((target.removesuffix(end) + name for end, name in names.items() if target.endswith(end)), target)
        weight = models.plain.get_submodule(name).weight
        exact = weight.double().numpy()
        weight.data = torch.from_numpy(exact + sample.change(exact, strength)).float()
    return before


def test_without_a_lora_the_two_classes_agree(models):
    assert torch.allclose(models.run(models.quantized), models.run(models.plain), atol=2e-3)


@pytest.mark.parametrize("producer", ["ai-toolkit", "musubi", "diffusion-pipe", "videox-fun"])
def test_a_lora_has_the_effect_that_it_has_on_the_unquantized_class(models, producer):
    base, plain_base = models.run(models.quantized), models.run(models.plain)
    state = {key: value.clone() for key, value in models.quantized.state_dict().items()}
    file = producers.make(producer, "z-image", dims=DIMS, blocks=2)
    try:
        report = lora.compose(models.quantized, [(file.tensors, 0.02)])
        assert report.complete, str(report)
        got = models.run(models.quantized)
    finally:
        lora.reset(models.quantized)
    if producer == "diffusion-pipe":
        # It fuses q, k and v: the same change as three layers is not in its reference.
        assert not torch.allclose(got, base, atol=1e-2)
    else:
        before = add(models, file, 0.02)
        wanted = models.run(models.plain)
        models.plain.load_state_dict(before)
        assert effect.mismatch(got, base, wanted, plain_base) < effect.TOLERANCE
    now = models.quantized.state_dict()
    assert all(torch.equal(effect._bits(now[key]), effect._bits(state[key])) for key in state)
    assert torch.equal(models.run(models.quantized), base)


def test_the_batch_of_one_that_the_kernel_can_rotate_is_what_shapes_hands_over(models):
    batch = shapes.to_batch(models.latent[:1], models.texts[:1])
    assert [tuple(image.shape) for image in batch.images] == [(16, 1, 8, 8)]
    assert models.run(models.quantized).shape == models.latent[:1].shape
