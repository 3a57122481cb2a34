"""The packed order of factors and biases, against index formulas and nunchaku's own packer."""

import os
import sys

import pytest
import torch
import trees

from qpatch.lora import packing


def noise(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def joined(down):
    return torch.stack(packing.pack_down(down, down.dtype), dim=1).flatten(1).view(down.shape[1], -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inp, out, rank", [(16, 16, 16), (64, 96, 16), (96, 64, 48), (128, 4096, 160)])
def test_packed_factors_multiply_to_the_product_of_the_plain_ones(inp, out, rank, dtype):
    down, up = noise(rank, inp, dtype=dtype), noise(out, rank, dtype=dtype)
    packed_down, packed_up = joined(down), packing.pack_up(up, dtype).view(out, rank)
    product = trees.unpacked(packed_up, False) @ trees.unpacked(packed_down, True)
    assert torch.allclose(product, up.double() @ down.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 4, 15, 20, 33])
def test_ranks_that_do_not_fill_a_fragment_are_padded_with_zeros(rank):
    down, up = noise(rank, 32), noise(48, rank)
    packed_down, packed_up = joined(down), packing.pack_up(up, torch.bfloat16).view(48, -1)
    assert packed_down.shape[1] == packed_up.shape[1] == packing.padded(rank) == -(-rank // 16) * 16
    plain_down, plain_up = trees.unpacked(packed_down, True), trees.unpacked(packed_up, False)
    assert (plain_down.abs().sum(1) > 0).sum() == rank and (plain_up.abs().sum(0) > 0).sum() == rank
    assert torch.allclose(plain_up @ plain_down, up.double() @ down.double(), rtol=1e-12, atol=1e-12)


def test_channels_keep_their_places():
    down = torch.zeros(16, 64, dtype=torch.bfloat16)
    down[:, 37] = 1
    assert trees.unpacked(joined(down), True).sum(0).nonzero().flatten().tolist() == [37]
    up = torch.zeros(64, 16, dtype=torch.bfloat16)
    up[37] = 1
    packed = packing.pack_up(up, torch.bfloat16).view(64, 16)
    assert trees.unpacked(packed, False).sum(1).nonzero().flatten().tolist() == [37]


def test_a_factor_that_begins_between_two_lanes_is_packed_alike():
    memory = noise(1 + 16 * 32)
    shifted = memory[1:].view(16, 32)
    assert shifted.storage_offset() == 1
    assert torch.equal(joined(shifted), joined(shifted.clone()))
    up = memory[1:].view(32, 16)
    assert torch.equal(packing.pack_up(up, torch.bfloat16), packing.pack_up(up.clone(), torch.bfloat16))


def test_factors_of_other_dtypes_and_strides_are_converted():
    down, up = noise(16, 32, dtype=torch.float32), noise(32, 16, dtype=torch.float32)
    assert torch.equal(torch.stack(packing.pack_down(down, torch.float16)),
                       torch.stack(packing.pack_down(down.half(), torch.float16)))
    assert torch.equal(packing.pack_up(up.T.contiguous().T, torch.bfloat16),
                       packing.pack_up(up.bfloat16(), torch.bfloat16))


@pytest.mark.parametrize("ranks", [16, 48, 128])
def test_ranks_of_packed_factors_can_be_scaled_one_by_one(ranks):
    down, up = noise(ranks, 32, dtype=torch.float16), noise(64, ranks, dtype=torch.float16)
    factors = torch.arange(1, ranks + 1)
    packed_up = (packing.pack_up(up, torch.float16).double() * factors[packing.ranks_of_up(ranks)]).view(64, ranks)
    product = trees.unpacked(packed_up, False) @ trees.unpacked(joined(down), True)
    assert torch.allclose(product, (up.double() * factors) @ down.double(), rtol=1e-12, atol=1e-12)


def test_unpack_follows_the_index_formula():
    factor = noise(64, 48)
    for down in (True, False):
        assert torch.equal(packing.unpack(factor, down).double(), trees.unpacked(factor, down))


def test_vectors_are_stored_in_the_order_of_the_kernels_lanes():
    plain = torch.arange(48.0)
    packed = packing.pack_vector(plain)
    assert packed[:16].tolist() == list(trees.BIAS_ORDER)
    assert torch.equal(trees.plain_bias(packed), plain.double())
    assert torch.equal(packing.unpack_vector(packed), plain)


@pytest.fixture
def converter():
    folder = os.environ.get("QPATCH_TEST_NUNCHAKU")
    if not folder:
        pytest.skip("QPATCH_TEST_NUNCHAKU does not name a folder with nunchaku in it")
    sys.path.insert(0, folder)
    try:
        converter = pytest.importorskip("nunchaku.lora.flux.nunchaku_converter", exc_type=ImportError)
    finally:
        sys.path.remove(folder)
    return converter, converter.NunchakuWeightPacker(bits=4)


@pytest.mark.nunchaku
@pytest.mark.parametrize("rank", [4, 16, 20, 96])
def test_nunchakus_unpacker_finds_the_same_product(converter, rank):
    unpack = converter[0].unpack_lowrank_weight
    down, up = noise(rank, 128), noise(256, rank)
    packed_down, packed_up = joined(down), packing.pack_up(up, torch.bfloat16).view(256, -1)
    product = unpack(packed_up, False).double() @ unpack(packed_down, True).double()
    assert torch.allclose(product, up.double() @ down.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.nunchaku
def test_our_unpacker_reads_what_nunchaku_packs(converter):
    pack, vectors = converter[0].pack_lowrank_weight, converter[1]
    down, up, bias = noise(32, 128), noise(256, 32), noise(256)
    assert torch.equal(packing.unpack(pack(down, True), True), down)
    assert torch.equal(packing.unpack(pack(up, False), False), up)
    stored = vectors.pack_scale(vectors.pad_scale(bias, group_size=-1), group_size=-1)
    assert torch.equal(packing.pack_vector(bias), stored.flatten())
