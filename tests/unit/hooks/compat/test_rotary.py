"""``rotary``: the function that ComfyUI lacked for a while."""

import torch

from qpatch.hooks.compat.rotary import apply_rotary_emb


def _reference(x, angles):
    """Complex rotation in float64: pair (a, b) at angle t becomes (a + ib) e^it. x [B, N, H, D], angles [N, D/2]."""
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
    turned = pairs * torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())[None, :, None]
    return torch.view_as_real(turned).reshape(x.shape)


def _matrices(angles):
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([cos, -sin, sin, cos], dim=-1).reshape(*angles.shape, 2, 2)[None, :, None]


def test_it_rotates_the_pairs_of_channels():
    torch.manual_seed(0)
    x, angles = torch.randn(1, 4, 2, 8, dtype=torch.float64), torch.rand(4, 4, dtype=torch.float64) * 6
    torch.testing.assert_close(apply_rotary_emb(x, _matrices(angles)), _reference(x, angles), rtol=1e-12, atol=1e-12)


def test_the_result_has_the_wider_dtype_of_the_two_and_nothing_is_cast_back():
    x = torch.zeros(1, 4, 2, 8, dtype=torch.bfloat16)
    assert apply_rotary_emb(x, _matrices(torch.zeros(4, 4))).dtype == torch.float32


def test_no_tokens_come_back_as_they_are():
    x = torch.zeros(1, 0, 2, 8)
    assert apply_rotary_emb(x, torch.zeros(1, 4, 1, 4, 2, 2)) is x


def test_it_is_supplied_where_it_is_missing(standin, mend):
    lacking = standin("compat/qwen_model.py", "comfy.ldm.qwen_image.model", ("def apply_rotary_emb", "def removed"))
    assert mend("rotary", lacking).verdict == "needed"
    assert lacking.apply_rotary_emb is apply_rotary_emb


def test_a_function_that_is_there_stays_the_very_same(standin, mend):
    present = standin("compat/qwen_model.py", "comfy.ldm.qwen_image.model")
    before = present.apply_rotary_emb
    assert mend("rotary", present).verdict == "not-needed"
    assert present.apply_rotary_emb is before
