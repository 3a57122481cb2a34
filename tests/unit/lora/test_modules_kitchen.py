"""Weights that ComfyUI keeps quantized, with comfy_kitchen itself (its CPU backend)."""

import pytest
import torch
import trees

from qpatch import lora

pytest.importorskip("comfy_kitchen")

from comfy_kitchen.tensor import (
    QuantizedTensor,
    TensorCoreAWQW4A16Layout,
    TensorCoreSVDQuantW4A4Layout,
    get_layout_class,
)

NAME = "transformer_blocks.0.attn.to_out.0"
OUT = "diffusion_model." + NAME
H = 256


def linear_with(weight, bias=True):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    module.bias = torch.nn.Parameter(torch.randn(weight.shape[0]).bfloat16()) if bias else None
    module.forward = lambda x: torch.nn.functional.linear(x, module.weight, module.bias)
    return module


def model_with(weight, bias=True):
    root = trees.qwen(h=H, plain=True)
    root.transformer_blocks[0].attn.to_out[0] = linear_with(weight, bias)
    return root, root.get_submodule(NAME)


def svdquant(out, inp, rank, act_unsigned=False):
    params = TensorCoreSVDQuantW4A4Layout.Params(
        scale=(torch.rand(inp // 64, out) * 0.1).bfloat16(), orig_dtype=torch.bfloat16, orig_shape=(out, inp),
        proj_down=(torch.randn(inp, rank) * 0.1).bfloat16(), proj_up=(torch.randn(out, rank) * 0.1).bfloat16(),
        smooth_factor=(torch.rand(inp) + 0.5).bfloat16(), act_unsigned=act_unsigned)
    packed = torch.randint(-128, 128, (out, inp // 2), dtype=torch.int8)
    return QuantizedTensor(packed, "TensorCoreSVDQuantW4A4Layout", params)


def pair(rank, rows=H, columns=H, seed=0, size=0.1):
    generator = torch.Generator().manual_seed(seed)
    down = (torch.randn(rank, columns, generator=generator) * size).bfloat16()
    up = (torch.randn(rows, rank, generator=generator) * size).bfloat16()
    return {f"{OUT}.lora_A.weight": down, f"{OUT}.lora_B.weight": up}, up.double() @ down.double()


@pytest.mark.parametrize("act_unsigned", [False, True])
@pytest.mark.parametrize("rank", [4, 16, 40])
def test_the_svdquant_kernels_output_changes_by_the_loras_term(rank, act_unsigned):
    torch.manual_seed(0)
    root, layer = model_with(svdquant(H, H, 32, act_unsigned))
    x, (tensors, product) = torch.rand(8, H).bfloat16(), pair(rank, size=1.0)
    before = layer.forward(x).double()
    lora.compose(root, [(tensors, 0.5)])
    added = layer.forward(x).double() - before
    wanted = 0.5 * x.double() @ product.T
    assert (added - wanted).norm() < 6e-3 * wanted.norm()
    assert layer.weight._params.proj_down.shape[1] % 16 == 0


def test_the_svdquant_layout_is_reset_bitwise_and_rescaled_in_place():
    torch.manual_seed(0)
    weight = svdquant(H, H, 32)
    root, layer = model_with(weight)
    original, x = layer.weight, torch.randn(4, H).bfloat16()
    before = layer.forward(x)
    lora.compose(root, [(pair(4)[0], 1.0), (pair(20, seed=1)[0], -0.5)])
    up = layer.weight._params.proj_up
    composed, old = layer.forward(x), up.clone()
    lora.set_strengths(root, [0.0, 0.0])
    assert torch.equal(layer.forward(x), before)
    lora.set_strengths(root, [1.0, -0.5])
    assert layer.weight._params.proj_up.data_ptr() == up.data_ptr()
    assert torch.equal(up, old) and torch.equal(layer.forward(x), composed)
    assert layer.weight._qdata.data_ptr() == original._qdata.data_ptr()
    lora.reset(root)
    assert layer.weight is original and torch.equal(layer.forward(x), before)


def test_svdquant_factors_in_tiles_of_128_rows_are_appended_in_tiles():
    torch.manual_seed(0)
    natural = svdquant(H, H, 32)
    params = natural._params
    tiles = params.proj_up.view(H // 128, 128, 32).transpose(1, 2).contiguous()
    rows = natural._qdata.view(H // 128, 32, 4, H // 64, 32)
    packed = rows.permute(0, 3, 1, 2, 4).reshape(H // 128, H // 64, 32, 128)
    scales = params.scale.t().reshape(H // 128, 128, H // 64).transpose(1, 2).contiguous()
    tiled = QuantizedTensor(packed.contiguous(), "TensorCoreSVDQuantW4A4Layout", type(params)(
        scale=scales, orig_dtype=params.orig_dtype, orig_shape=params.orig_shape,
        proj_down=params.proj_down, proj_up=tiles, smooth_factor=params.smooth_factor))
    x, tensors = torch.randn(4, H).bfloat16(), pair(20, size=0.5)[0]
    outputs = []
    for weight in (natural, tiled):
        root, layer = model_with(weight, bias=False)
        lora.compose(root, [(tensors, 0.5)])
        first = layer.forward(x)
        lora.set_strengths(root, [0.25])
        outputs.append((first, layer.forward(x)))
    for one, other in zip(*outputs):
        assert torch.equal(one, other)


@pytest.mark.parametrize("layout, options, error", [
    ("TensorCoreFP8Layout", {}, 0.03), ("TensorWiseINT8Layout", {"is_weight": True, "per_channel": True}, 0.012),
    ("TensorWiseINT8Layout", {"is_weight": True, "per_channel": True, "convrot": True, "convrot_groupsize": 64}, 0.012),
    ("TensorCoreNVFP4Layout", {}, 0.12), ("TensorCoreMXFP8Layout", {}, 0.04),
    ("TensorCoreConvRotW4A4Layout", {"convrot_groupsize": 256}, 0.16),
])
def test_a_weight_is_dequantized_changed_and_quantized_with_its_own_options(layout, options, error):
    torch.manual_seed(0)
    try:
        weight = QuantizedTensor.from_float(torch.randn(H, H).bfloat16(), layout, **options)
    except KeyError:
        pytest.skip(f"this comfy_kitchen has no {layout}")
    root, layer = model_with(weight)
    original, before = layer.weight, layer.weight.dequantize().double()
    tensors, product = pair(16, size=0.7)
    report = lora.compose(root, [(tensors, 1.0)])
    after = layer.weight.dequantize().double()
    assert (after - before - product).norm() < error * (before + product).norm()
    for name, value in vars(original._params).items():
        if not isinstance(value, torch.Tensor):
            assert getattr(layer.weight._params, name) == value, name
    (line,) = report.files[0].lines
    assert abs(line.kept - ((after - before) * product).sum().item() / product.square().sum().item()) < 1e-3
    lora.set_strengths(root, [0.0])
    assert torch.equal(layer.weight.dequantize().double(), before)
    lora.reset(root)
    assert layer.weight is original


def test_the_logical_shape_counts_where_the_storage_is_padded():
    torch.manual_seed(0)
    root = trees.qwen(h=60, f=128, plain=True)
    weight = QuantizedTensor.from_float(torch.randn(60, 60).bfloat16(), "TensorCoreNVFP4Layout")
    assert weight.storage_shape != (60, 30)
    root.transformer_blocks[0].attn.to_out[0] = linear_with(weight)
    tensors, product = pair(16, 60, 60, size=0.5)
    lora.compose(root, [(tensors, 1.0)])
    after = root.get_submodule(NAME).weight
    assert after.shape == (60, 60)
    wanted = weight.dequantize().double() + product
    assert (after.dequantize().double() - wanted).norm() < 0.12 * wanted.norm()


def test_what_a_coarse_format_does_not_keep_is_said():
    torch.manual_seed(0)
    root, _ = model_with(QuantizedTensor.from_float(torch.randn(H, H).bfloat16(), "TensorCoreNVFP4Layout"))
    report = lora.compose(root, [(pair(16, size=0.03)[0], 1.0)])
    assert report.files[0].lines[0].kept < 0.5 and "kept by the weight's format" in str(report)


def test_a_layout_that_is_only_made_offline_gets_a_branch():
    torch.manual_seed(0)
    params = TensorCoreAWQW4A16Layout.Params(
        scale=(torch.rand(H // 64, H) * 0.1).bfloat16(), orig_dtype=torch.bfloat16, orig_shape=(H, H),
        zeros=torch.randn(H // 64, H).bfloat16(), group_size=64)
    packed = torch.randint(-128, 128, (H, H // 2), dtype=torch.int8)
    weight = QuantizedTensor(packed, "TensorCoreAWQW4A16Layout", params)
    root, layer = model_with(weight)
    linear = torch.nn.Linear(H, H, dtype=torch.bfloat16)
    linear.weight, linear.bias = layer.weight, layer.bias
    root.transformer_blocks[0].attn.to_out[0] = linear
    x, (tensors, product) = torch.randn(4, H).bfloat16(), pair(16, size=1.0)
    before = linear(x).double()
    lora.compose(root, [(tensors, 0.5)])
    wanted = 0.5 * x.double() @ product.T
    assert (linear(x).double() - before - wanted).norm() < 8e-3 * wanted.norm()
    lora.reset(root)
    assert linear.weight is layer.weight and torch.equal(linear(x).double(), before)


def test_the_bias_of_a_quantized_weight_takes_its_change():
    torch.manual_seed(0)
    root, layer = model_with(svdquant(H, H, 32))
    before, diff = layer.bias.detach().clone(), torch.randn(H)
    lora.compose(root, [({f"{OUT}.diff_b": diff}, 0.5)])
    assert (layer.bias.double() - before.double() - 0.5 * diff.double()).abs().max() < 0.02


def test_kitchens_own_dequantization_of_svdquant_agrees_with_ours():
    """The layouts agree up to the packing: the same numbers, packed as nunchaku does, give the same weight."""
    import stored_weights

    from qpatch.lora.modules import recognise
    from qpatch.lora.packing import pack_vector

    torch.manual_seed(0)
    inp = out = 128
    kitchen, layer = svdquant(out, inp, 16), trees.SVDQW4A4Linear(inp, out)
    n, k = torch.arange(out)[:, None].expand(out, inp), torch.arange(inp)[None].expand(out, inp)
    codes = torch.randint(-7, 8, (out, inp))
    kitchen._qdata.copy_(((codes[:, 0::2] & 15) | ((codes[:, 1::2] & 15) << 4)).to(torch.uint8).view(torch.int8))
    word, shift = stored_weights.code_place(n, k, inp)
    words = torch.zeros(out * inp // 8, dtype=torch.int64).index_put((word,), (codes & 15) << shift, accumulate=True)
    layer.qweight.data = words.to(torch.int32).view(torch.int8).view(out, inp // 2)
    scales = torch.empty(out * inp // 64, dtype=torch.bfloat16)
    scales[stored_weights.group_scale_place(n, k, inp)] = kitchen._params.scale.t()[n, k // 64]
    layer.wscales.data = scales.view(inp // 64, out)
    layer.smooth_factor.data = pack_vector(kitchen._params.smooth_factor)
    layer.proj_up.data.zero_(), kitchen._params.proj_up.zero_()
    ours, theirs = recognise("layer", layer).weight(), kitchen.dequantize().float()
    assert (ours - theirs).norm() < 0.01 * theirs.norm()
    assert get_layout_class("TensorCoreSVDQuantW4A4Layout") is TensorCoreSVDQuantW4A4Layout
