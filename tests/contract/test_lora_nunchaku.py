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
            parameter.copy_(getattr(like, name) if getattr(like, name, None) is not None else torch.ones_like(parameter))
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
    wanted = torch.cat([torch.from_numpy(example.layers[f"layers.0.attention.qkv[{part}]"].change(None, 0.7)) for part in "qkv"])
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
    example = producers.make("peft", "qwen-image", rank=5, dims={**trees.QWEN_DIMS, "h": 128, "f": 128, "m": 768, "n": 256})
    lora.compose(root, [(example.tensors, 0.7)])
    after = layer(x).double()
    added = (after - before).view(3, -1, 6).transpose(1, 2).reshape(3, -1)
    wanted = x.double() @ torch.from_numpy(example.layers["transformer_blocks.0.img_mod.1"].change(None, 0.7)).T
    # The output is rounded to bfloat16 as a whole, before and after.
    assert (added - wanted).norm() < 0.01 * wanted.norm() + torch.finfo(torch.bfloat16).eps * after.norm()
    assert wanted.norm() > 0.1 * after.norm()
