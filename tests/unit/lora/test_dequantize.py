"""The base weight rebuilt from quantized layers, against index formulas and nunchaku's packer."""

import os
import sys

import pytest
import stored_weights
import torch
import trees

from qpatch.lora import dequantize
from qpatch.lora.errors import UnsupportedAdapter
from qpatch.lora.modules import recognise


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["int4", "nvfp4"])
@pytest.mark.parametrize("inp, out", [(128, 128), (256, 384)])
def test_the_weight_of_an_svdq_layer_is_its_residual_and_its_low_rank_branch(precision, dtype, inp, out):
    torch.manual_seed(inp)
    layer = trees.SVDQW4A4Linear(inp, out, dtype=dtype, precision=precision)
    weight = recognise("layer", layer).weight()
    expected = stored_weights.svdq_weight(layer)
    assert weight.dtype == torch.float32
    assert (weight - expected).norm() < 1e-6 * expected.norm()


def test_an_svdq_layer_of_an_unknown_packed_shape_is_refused():
    layer = trees.SVDQW4A4Linear(64, 128)
    with pytest.raises(UnsupportedAdapter, match="layer: .*cannot be rebuilt"):
        recognise("layer", layer).weight()


@pytest.mark.parametrize("inp, out", [(64, 128), (128, 768)])
def test_the_weight_of_an_awq_layer_comes_in_the_row_order_of_the_original(inp, out):
    torch.manual_seed(inp)
    layer = trees.AWQW4A16Linear(inp, out)
    weight = recognise("layer", layer).weight()
    expected = stored_weights.planar(stored_weights.awq_weight(layer), out // inp)
    assert (weight - expected).norm() < 1e-6 * expected.norm()


def test_zero_rows_that_pad_the_scales_of_an_awq_layer_are_no_groups():
    layer = trees.AWQW4A16Linear(128, 256)
    padded = [torch.cat((table, torch.zeros(14, 256, dtype=table.dtype))) for table in (layer.wscales, layer.wzeros)]
    found = dequantize.awq(layer.qweight, *padded, 256, 128)
    assert torch.equal(found, dequantize.awq(layer.qweight, layer.wscales, layer.wzeros, 256, 128))


@pytest.fixture
def packer():
    folder = os.environ.get("QPATCH_TEST_NUNCHAKU")
    if not folder:
        pytest.skip("QPATCH_TEST_NUNCHAKU does not name a folder with nunchaku in it")
    sys.path.insert(0, folder)
    try:
        return pytest.importorskip("nunchaku.lora.flux.packer", exc_type=ImportError).NunchakuWeightPacker(bits=4)
    finally:
        sys.path.remove(folder)


@pytest.mark.nunchaku
def test_int4_codes_and_scales_that_nunchaku_packs_are_read_back(packer):
    layer = trees.SVDQW4A4Linear(256, 384)
    codes = torch.randint(-8, 8, (384, 256), dtype=torch.int32)
    scales = (torch.rand(384, 1, 4, 1) + 0.5).bfloat16()
    smooth = (torch.rand(256) + 0.5).bfloat16()
    layer.qweight.data = packer.pack_weight(codes.clone())
    layer.wscales.data = packer.pack_scale(scales, group_size=64).view(4, 384)
    layer.smooth_factor.data = packer.pack_scale(smooth, group_size=-1).flatten()
    expected = codes * scales.double().view(384, 4).repeat_interleave(64, 1) / smooth.double() + trees.effective(layer)
    assert (recognise("layer", layer).weight() - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.nunchaku
def test_nvfp4_codes_and_scales_that_nunchaku_packs_are_read_back(packer):
    layer = trees.SVDQW4A4Linear(256, 384, precision="nvfp4")
    codes = torch.randint(0, 16, (384, 256), dtype=torch.int32)
    micro = (torch.rand(384, 16) * 4 + 0.5).to(torch.float8_e4m3fn)
    channel = (torch.rand(384) + 0.5).bfloat16()
    layer.qweight.data = packer.pack_weight(codes.clone())
    layer.wscales.data = packer.pack_scale(micro.bfloat16().view(384, 1, 16, 1), group_size=16).view(16, 384)
    layer.wcscales.data = packer.pack_scale(channel, group_size=-1).flatten()
    layer.smooth_factor.data.fill_(1)
    values = torch.cat((stored_weights.E2M1, -stored_weights.E2M1))[codes]
    expected = values * micro.double().repeat_interleave(16, 1) * channel.double()[:, None] * layer.wtscale
    expected = expected + trees.effective(layer)
    assert (recognise("layer", layer).weight() - expected).norm() < 1e-6 * expected.norm()
