"""Compositions in nunchaku's own layers, read back with nunchaku's own unpacker.

Set QPATCH_TEST_NUNCHAKU to a folder that holds ``nunchaku``; without it everything here is skipped.
"""

import os

import expected
import producers
import pytest
import stored_weights
import torch
import trees

from qpatch import lora
from qpatch.lora.keys import Target
from qpatch.lora.placement import Places

pytestmark = pytest.mark.nunchaku


@pytest.fixture
def nunchaku(monkeypatch):
    folder = os.environ.get("QPATCH_TEST_NUNCHAKU")
    if not folder:
        pytest.skip("QPATCH_TEST_NUNCHAKU does not name a folder with nunchaku in it")
    monkeypatch.syspath_prepend(folder)
    return lambda name: pytest.importorskip(f"nunchaku.{name}", exc_type=ImportError)


@pytest.fixture
def real_layers(nunchaku, monkeypatch):
    """Let trees.py build its trees from the real classes."""
    linear = nunchaku("models.linear")

    def svdq(inp, out, rank=16, bias=True, dtype=torch.bfloat16, precision="int4"):
        layer = linear.SVDQW4A4Linear(inp, out, rank, bias, precision, torch_dtype=dtype)
        return filled(layer, stand_ins[0](inp, out, rank, bias, dtype, precision))

    def awq(inp, out, dtype=torch.bfloat16):
        return filled(linear.AWQW4A16Linear(inp, out, torch_dtype=dtype), stand_ins[1](inp, out, dtype))

    stand_ins = trees.SVDQW4A4Linear, trees.AWQW4A16Linear
    monkeypatch.setattr(trees, "SVDQW4A4Linear", svdq)
    monkeypatch.setattr(trees, "AWQW4A16Linear", awq)
    unpack = nunchaku("lora.flux.nunchaku_converter").unpack_lowrank_weight
    monkeypatch.setattr(trees, "unpacked", lambda factor, down: unpack(factor.detach(), down).double())
    return linear


def filled(layer, like):
    """``layer`` with the numbers of a stand-in."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            value = getattr(like, name, None)
            parameter.copy_(torch.ones_like(parameter) if value is None else value)
    if hasattr(layer, "wtscale"):
        layer.wtscale = like.wtscale
    return layer


def check(root, bare, example, strength):
    for name, (weight, _) in expected.changes(example, bare, strength).items():
        added, before = (expected.low_rank_of(one.get_submodule(name)) for one in (root, bare))
        if added is not None:
            assert expected.relative(added - before, weight) < 6e-3, name


def twins(build):
    torch.manual_seed(0)
    root, bare = build(), build()
    bare.load_state_dict(root.state_dict())
    return root, bare


@pytest.mark.parametrize("precision", ["int4", "nvfp4"])
@pytest.mark.parametrize("kind", ["lora", "dora", "lokr"])
@pytest.mark.parametrize("family", ["qwen-image", "z-image"])
def test_nunchakus_layers_hold_the_loras_and_are_reset(real_layers, family, kind, precision):
    build = {"qwen-image": trees.qwen, "z-image": trees.z_image}[family]
    sizes = {"qwen-image": {**trees.QWEN_DIMS, "m": 768, "n": 256}, "z-image": {**trees.Z_DIMS, "m": 512}}[family]
    root, bare = twins(lambda: build(h=128, f=256, precision=precision))
    assert any(isinstance(module, real_layers.SVDQW4A4Linear) for module in root.modules())
    example = producers.make("simpletuner lycoris", family, kind, rank=5, dims={**sizes, "h": 128, "f": 256})
    lora.compose(root, [(example.tensors, 0.7)], max_rank=256)
    check(root, bare, example, 0.7)
    for module in root.modules():
        if isinstance(module, real_layers.SVDQW4A4Linear):
            assert module.rank == module.proj_down.shape[1] == module.proj_up.shape[1]
    lora.reset(root)
    assert all(torch.equal(one, other) for one, other in zip(root.state_dict().values(), bare.state_dict().values()))


def test_the_fused_module_of_the_diffusers_class_holds_them(real_layers, nunchaku, monkeypatch):
    fused = nunchaku("models.transformers.transformer_zimage").NunchakuZImageFusedModule
    monkeypatch.setattr(trees, "FusedModule", fused)
    root, bare = twins(lambda: trees.z_image(diffusers="fused_module"))
    module, before = (one.get_submodule("layers.0.attention.fused_module") for one in (root, bare))
    assert isinstance(module, fused)
    example = producers.make("musubi", "z-image", rank=5, dims=trees.Z_DIMS)
    assert lora.compose(root, [(example.tensors, 0.7)]).complete
    wanted = torch.cat([torch.from_numpy(example.layers[f"layers.0.attention.qkv[{part}]"].change(None, 0.7))
                        for part in "qkv"])
    added = trees.effective(module, "qkv_") - trees.effective(before, "qkv_")
    assert expected.relative(added, wanted) < 6e-3
    lora.reset(root)
    assert all(torch.equal(one, other) for one, other in zip(root.state_dict().values(), bare.state_dict().values()))


def test_the_forward_of_the_real_modulation_layer_changes_by_the_product(real_layers, nunchaku, monkeypatch):
    ops = nunchaku("_C").ops
    root, bare = twins(lambda: trees.qwen(h=128, f=128))
    layer = root.get_submodule("transformer_blocks.0.img_mod.1")
    dense = stored_weights.awq_weight(layer)
    monkeypatch.setattr(ops, "gemv_awq", lambda x, *_: (x.double() @ dense.T).to(x.dtype))
    x = torch.randn(3, 128).bfloat16()
    before = layer(x).double()
    dims = {**trees.QWEN_DIMS, "h": 128, "f": 128, "m": 768, "n": 256}
    example = producers.make("peft", "qwen-image", rank=5, dims=dims)
    lora.compose(root, [(example.tensors, 0.7)])
    after = layer(x).double()
    added = (after - before).view(3, -1, 6).transpose(1, 2).reshape(3, -1)
    wanted = x.double() @ torch.from_numpy(example.layers["transformer_blocks.0.img_mod.1"].change(None, 0.7)).T
    # The output is rounded to bfloat16 as a whole, before and after.
    assert (added - wanted).norm() < 0.01 * wanted.norm() + torch.finfo(torch.bfloat16).eps * after.norm()
    assert wanted.norm() > 0.1 * after.norm()


def blank(model):
    """``model`` with its weights zeroed: nunchaku's layers come with whatever memory held."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.zero_()
    return model


@pytest.mark.parametrize("skip_refiners", [True, False])
@pytest.mark.parametrize("producer", ["musubi", "diffusion-pipe"])
def test_every_layer_finds_its_place_in_the_diffusers_z_image(nunchaku, producer, skip_refiners):
    kind = nunchaku("models.transformers.transformer_zimage").NunchakuZImageTransformer2DModel
    model = kind(dim=384, n_layers=2, n_refiner_layers=1, n_heads=3, n_kv_heads=3, cap_feat_dim=64,
                 axes_lens=[64, 64, 64])
    model.to(torch.bfloat16)._patch_model(skip_refiners=skip_refiners, precision="int4", rank=16)
    # The fused modules come into being after a state dict is loaded.
    blank(model).load_state_dict(model.state_dict())
    dims = {"h": 384, "f": 1024, "m": 1536, "l": 64, "t": 64, "c": 256}
    example = producers.make(producer, "z-image", rank=4, dims=dims, singles=False)
    file = lora.compose(model, [(example.tensors, 1.0)]).files[0]
    assert file.applied == file.total == len(example.layers) and not file.misses


def test_every_layer_finds_its_place_in_the_diffusers_qwen_image(nunchaku):
    kind = nunchaku("models.transformers.transformer_qwenimage").NunchakuQwenImageTransformer2DModel
    model = kind(num_layers=1, num_attention_heads=2, joint_attention_dim=64)
    model.to(torch.bfloat16)._patch_model(precision="int4", rank=16)
    example = producers.make("peft", "qwen-image", rank=4, dims={"h": 256, "f": 1024, "m": 1536}, singles=False)
    file = lora.compose(blank(model), [(example.tensors, 1.0)]).files[0]
    assert file.applied == file.total == len(example.layers) and not file.misses


def test_the_layers_of_flux_have_their_places_in_nunchakus_second_class(nunchaku):
    kind = nunchaku("models.transformers.transformer_flux_v2").NunchakuFluxTransformer2DModelV2
    model = kind(num_layers=1, num_single_layers=1, num_attention_heads=2, joint_attention_dim=64,
                 pooled_projection_dim=64)
    model.to(torch.bfloat16)._patch_model(precision="int4", rank=16)
    places = Places(model, None)

    def found(name, part=None):
        return [(place.site.path.rpartition("blocks.0.")[2], place.site.kind, place.rows, place.columns)
                for place in places.find(Target(name, part))]

    double, single = "transformer_blocks.0.", "single_transformer_blocks.0."
    assert found(double + "attn.to_qkv", "k") == [("attn.to_qkv", "svdq", slice(256, 512), None)]
    assert found(double + "attn.add_qkv_proj", "v") == [("attn.add_qkv_proj", "svdq", slice(512, 768), None)]
    assert found(single + "proj_mlp") == [("mlp_fc1", "svdq", slice(0, 1024), None)]
    assert found(single + "proj_out") == [("attn.to_out", "svdq", slice(0, 256), slice(0, 256)),
                                          ("mlp_fc2", "svdq", slice(0, 256), slice(256, 1280))]
    norms = (double + "norm1.linear", 6), (double + "norm1_context.linear", 6), (single + "norm.linear", 3)
    for name, splits in norms:
        (place,) = places.find(Target(name))
        assert place.site.kind == "awq" and place.site.splits == splits
