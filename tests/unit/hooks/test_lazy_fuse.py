"""Fusing lazy Linears: w1 and w3 in ComfyUI-nunchaku, q, k and v in nunchaku."""

import pytest
import torch

from qpatch import patching
from qpatch.finding import INCOMPATIBLE, NEEDED, NOT_NEEDED
from qpatch.hooks import lazy_fuse, lazy_linear, zimage_fuse

ZIMAGE = "custom_nodes/ComfyUI-nunchaku/models/zimage.py", "folder.models.zimage"
UTILS = "packages/nunchaku/models/utils.py", "nunchaku.models.utils"
LINEAR = "packages/nunchaku/models/linear.py", "nunchaku.models.linear"


@pytest.fixture
def linear(standin, comfy):
    return standin(*LINEAR)


@pytest.fixture
def zimage(standin, linear):
    """models.zimage of the pack, as it is upstream."""
    return standin(*ZIMAGE)


@pytest.fixture
def mended(standin, linear):
    module = standin(*ZIMAGE)
    patching.put(list(zimage_fuse.patches(module)))
    return module


def kinds(layer):
    return {name: (tuple(t.shape), t.dtype, t.device.type) for name, t in layer.state_dict().items()}


@pytest.mark.parametrize("asked", [{}, {"torch_dtype": torch.float16}, {"rank": 16, "precision": "nvfp4"}])
@pytest.mark.parametrize("filled", [(), (0,), (1,), (0, 1)])
def test_two_lazy_linears_fuse_to_the_layer_that_filled_ones_give_upstream(comfy, zimage, mended, asked, filled):
    full = [comfy.linear(128, 192, dtype=torch.bfloat16, lazy=False) for _ in range(2)]
    some = [comfy.linear(128, 192, dtype=torch.bfloat16, lazy=place not in filled) for place in range(2)]
    made = mended.fuse_to_svdquant_linear(*some, **asked)
    assert kinds(made) == kinds(zimage.fuse_to_svdquant_linear(*full, **asked))
    assert made.out_features == 384 and made.comfy_cast_weights and made.weight is None
    assert [each.weight is None for each in some] == [place not in filled for place in range(2)]


def test_upstream_itself_fails_on_lazy_linears(comfy, zimage):
    pair = [comfy.linear(128, 128, dtype=torch.bfloat16) for _ in range(2)]
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'dtype'"):
        zimage.fuse_to_svdquant_linear(*pair, torch_dtype=torch.float16)


def test_the_first_linear_decides_on_the_dtype(comfy, mended):
    filled, undeclared = comfy.linear(128, 64, dtype=torch.float16, lazy=False), comfy.linear(128, 64)
    assert mended.fuse_to_svdquant_linear(filled, undeclared).proj_down.dtype == torch.float16


@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, True)])
def test_linears_that_declared_a_bias_are_refused_as_filled_ones_are(comfy, zimage, mended, biases):
    def pair(lazy):
        return [comfy.linear(128, 128, bias=bias, dtype=torch.bfloat16, lazy=lazy) for bias in biases]

    with pytest.raises(AssertionError):
        zimage.fuse_to_svdquant_linear(*pair(lazy=False))
    with pytest.raises(AssertionError):
        mended.fuse_to_svdquant_linear(*pair(lazy=True))


def test_the_device_of_the_call_decides_where_the_fused_layer_lies(comfy, mended):
    pair = [comfy.linear(128, 128, dtype=torch.bfloat16) for _ in range(2)]
    assert mended.fuse_to_svdquant_linear(*pair, device="meta").qweight.device.type == "meta"
    # A filled first Linear decides by itself; upstream takes no device beside it, and still does not.
    pair[0] = comfy.linear(128, 128, dtype=torch.bfloat16, lazy=False)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'device'"):
        mended.fuse_to_svdquant_linear(*pair, device="meta")


def test_without_a_dtype_the_error_names_layer_and_remedy(comfy, mended):
    pair = [comfy.linear(128, 64), comfy.linear(128, 64, dtype=torch.bfloat16)]
    with pytest.raises(TypeError, match=r"Linear\(in_features=128, out_features=64\).*pass torch_dtype="):
        mended.fuse_to_svdquant_linear(*pair)


def test_a_quantized_layer_is_refused_with_an_error_that_says_so(comfy, mended):
    fused = mended.fuse_to_svdquant_linear(*[comfy.linear(128, 64, dtype=torch.bfloat16) for _ in range(2)])
    with pytest.raises(TypeError, match="fuse_to_svdquant_linear wants a plain Linear.*quantized already"):
        mended.fuse_to_svdquant_linear(fused, fused)


def test_the_fuse_of_the_pack_is_needed_until_it_copes_by_itself(comfy, standin, zimage, mended):
    assert zimage_fuse.examine(zimage).verdict == NEEDED
    assert zimage_fuse.examine(mended).verdict == NOT_NEEDED
    changes = [
        ('kwargs.pop("torch_dtype", comfy_linear1.weight.dtype)',
         'kwargs.pop("torch_dtype", None) or comfy_linear1.weight_comfy_model_dtype'),
        ("device=comfy_linear1.weight.device", 'device="cpu"'),
    ]
    half = zimage_fuse.examine(standin(*ZIMAGE, *changes))
    assert half.verdict == NEEDED and "drops the biases" in half.reason
    changes.append(("assert comfy_linear1.bias is None", "assert not comfy_linear1.comfy_need_lazy_init_bias"))
    assert zimage_fuse.examine(standin(*ZIMAGE, *changes)).verdict == NOT_NEEDED


@pytest.mark.parametrize("change, words", [
    (("comfy_linear1, comfy_linear2, **kwargs", "comfy_linear1, comfy_linear2, rank, **kwargs"),
     "missing a required argument"),
    (("out_features + comfy_linear2.out_features", "out_features"), "makes a layer of 128 outputs out of 128 + 128"),
])
def test_a_fuse_of_another_shape_is_incompatible_with_the_reason(standin, linear, change, words):
    finding = zimage_fuse.examine(standin(*ZIMAGE, change))
    assert finding.verdict == INCOMPATIBLE and words in finding.reason


@pytest.fixture
def utils(standin):
    module = standin(*UTILS)
    patching.put(list(lazy_fuse.patches(module)))
    return module


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("asked", [{}, {"torch_dtype": torch.float16}])
def test_fused_lazy_q_k_v_give_the_quantized_layer_that_filled_ones_give(comfy, standin, linear, utils, bias, asked):
    upstream = standin(*UTILS)
    filled = [comfy.linear(128, 64, bias=bias, dtype=torch.bfloat16, lazy=False) for _ in range(3)]
    source = [comfy.linear(128, 64, bias=bias, dtype=torch.bfloat16) for _ in range(3)]
    wanted = linear.SVDQW4A4Linear.from_linear(upstream.fuse_linears(filled), **asked)
    patching.put(list(lazy_linear.patches(linear)))
    fused = utils.fuse_linears(source)
    assert list(fused.parameters()) == [] and fused is not source[0] and source[0].out_features == 64
    assert kinds(linear.SVDQW4A4Linear.from_linear(fused, **asked)) == kinds(wanted)


def test_a_bias_survives_the_fuse_only_if_all_declare_one(comfy, utils):
    mixed = [comfy.linear(128, 64, bias=bias, dtype=torch.bfloat16) for bias in (True, True, False)]
    assert not utils.fuse_linears(mixed).comfy_need_lazy_init_bias


def test_a_fused_lazy_linear_loads_its_weights_as_any_other(comfy, utils):
    fused = utils.fuse_linears([comfy.linear(128, 64, bias=True, dtype=torch.bfloat16) for _ in range(3)])
    comfy.memory.aimdo_enabled = True
    weight, bias = torch.randn(192, 128), torch.randn(192)
    assert not any(fused.load_state_dict({"weight": weight, "bias": bias}))
    assert torch.equal(fused.weight, weight) and torch.equal(fused.bias, bias)


def test_fusing_lazy_linears_needs_no_memory_for_their_weights(comfy, utils):
    # 3 x 10^12 elements: more than any machine has.
    fused = utils.fuse_linears([comfy.linear(10**6, 10**6, dtype=torch.bfloat16) for _ in range(3)])
    assert (fused.in_features, fused.out_features) == (10**6, 3 * 10**6)


def test_a_single_linear_and_filled_ones_are_fused_as_upstream_does(comfy, utils):
    single = comfy.linear(128, 64, dtype=torch.bfloat16)
    assert utils.fuse_linears([single]) is single
    filled = utils.fuse_linears([torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)])
    assert type(filled) is torch.nn.Linear and filled.weight.shape == (8, 8)


def test_linears_that_do_not_fit_together_are_refused_as_upstream_does(comfy, utils):
    with pytest.raises(AssertionError):
        utils.fuse_linears([comfy.linear(128, 64), comfy.linear(64, 64)])


def test_trying_fuse_linears_leaves_the_random_numbers_alone(standin):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    module = standin(*UTILS)
    assert lazy_fuse.examine(module).verdict == NEEDED
    assert torch.equal(torch.rand(3), expected)


def test_fuse_linears_is_judged_by_what_it_does(standin, utils):
    assert lazy_fuse.examine(utils).verdict == NOT_NEEDED
    assert lazy_fuse.examine(standin(*UTILS, ("def fuse_linears", "def join_linears"))).verdict == NOT_NEEDED
    other = standin(*UTILS, ("fuse_linears(linears)", "fuse_linears(linears, names)"))
    assert lazy_fuse.examine(other).verdict == INCOMPATIBLE
