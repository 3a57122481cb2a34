"""The smaller places in nunchaku that read a Linear's dtype and device."""

import pytest
import torch

from qpatch import patching
from qpatch.finding import INCOMPATIBLE, NEEDED, NOT_NEEDED
from qpatch.hooks import lazy_w4, lazy_zimage_ff

W4 = "packages/nunchaku/models/text_encoders/linear.py", "nunchaku.models.text_encoders.linear"
ZIMAGE = (
    "packages/nunchaku/models/transformers/transformer_zimage.py",
    "nunchaku.models.transformers.transformer_zimage",
)


@pytest.fixture
def w4(standin):
    module = standin(*W4)
    patching.put(list(lazy_w4.patches(module)))
    return module.W4Linear


@pytest.fixture
def zimage(standin):
    """nunchaku's transformer_zimage, as it is upstream."""
    standin("packages/nunchaku/models/linear.py", "nunchaku.models.linear")
    standin("packages/nunchaku/models/utils.py", "nunchaku.models.utils")
    return standin(*ZIMAGE)


@pytest.mark.parametrize("bias", [False, True])
def test_an_empty_w4_layer_is_made_of_a_lazy_linear(comfy, w4, bias):
    source = comfy.linear(128, 64, bias=bias, dtype=torch.float16)
    layer = w4.from_linear(source, 64, init_only=True)
    assert (layer.in_features, layer.out_features, layer.group_size) == (128, 64, 64)
    assert (layer.bias is not None) == bias and (not bias or layer.bias.dtype == torch.float16)
    assert source.weight is None


def test_a_w4_layer_is_not_quantized_out_of_a_weight_that_is_not_there(comfy, w4):
    source = comfy.linear(128, 64, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"Linear\(in_features=128, out_features=64\) has no weight.*init_only=True"):
        w4.from_linear(source, 64)


def test_a_filled_linear_is_quantized_as_upstream_does(comfy, w4):
    filled = comfy.linear(128, 64, dtype=torch.float16, lazy=False)
    torch.nn.init.ones_(filled.weight)
    assert w4.from_linear(filled, 64).qweight.eq(1).all()


def test_w4_is_judged_by_what_it_does(standin):
    assert lazy_w4.examine(standin(*W4)).verdict == NEEDED
    assert lazy_w4.examine(standin(*W4, ("def from_linear", "def of_linear"))).verdict == NOT_NEEDED
    assert lazy_w4.examine(standin(*W4, ("@staticmethod", "@classmethod"))).verdict == INCOMPATIBLE
    assert lazy_w4.examine(standin(*W4, ("init_only=False", "empty=False"))).verdict == INCOMPATIBLE


def test_a_lazy_feed_forward_is_converted_in_its_declared_dtype(comfy, zimage):
    ff = zimage.ZImageFeedForward(8, 16)
    for name, shape in (("w1", (8, 16)), ("w2", (16, 8)), ("w3", (8, 16))):
        setattr(ff, name, comfy.linear(*shape, dtype=torch.bfloat16))
    with pytest.raises(AttributeError):
        zimage._convert_z_image_ff(ff)
    assert lazy_zimage_ff.examine(zimage).verdict == NEEDED
    patching.put(list(lazy_zimage_ff.patches(zimage)))
    made = zimage._convert_z_image_ff(ff)
    assert made.net[0].weight.shape == (32, 8)
    assert {(p.dtype, p.device.type) for p in made.parameters()} == {(torch.bfloat16, "cpu")}
    assert ff.w1.weight is None


def test_a_filled_feed_forward_reaches_upstream_as_the_same_object(standin, zimage):
    zimage = standin(*ZIMAGE, ("    made = FeedForward(", "    seen.append(z_ff)\n    made = FeedForward("))
    zimage.seen = []
    patching.put(list(lazy_zimage_ff.patches(zimage)))
    ff = zimage.ZImageFeedForward(8, 16).half()
    assert zimage._convert_z_image_ff(ff).net[1].weight.dtype == torch.float16
    assert zimage.seen[0] is ff


def test_a_conversion_that_reads_no_weight_or_is_gone_is_left_alone(standin, zimage):
    other = standin(*ZIMAGE, ("dtype=z_ff.w1.weight.dtype, device=z_ff.w1.weight.device", "torch.bfloat16"))
    assert lazy_zimage_ff.examine(other).verdict == NOT_NEEDED
    gone = standin(*ZIMAGE, ("_convert_z_image_ff", "_convert_feed_forward"))
    assert lazy_zimage_ff.examine(gone).verdict == NOT_NEEDED
