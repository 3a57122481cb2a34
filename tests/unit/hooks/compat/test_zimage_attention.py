"""``zimage_attention``: settings that the pack does not copy."""

import pytest

FILE = "compat/zimage_attention.py", "pack.models.zimage"


def test_the_stand_in_has_the_fault(standin):
    module = standin(*FILE)
    with pytest.raises(AttributeError, match="qk_norm"):
        module.ComfyNunchakuZImageAttention(module.JointAttention(2, True)).forward(3)


@pytest.mark.parametrize("norm, says", [(True, "normed"), (False, "plain")])
def test_the_attention_runs_with_the_setting_of_the_one_it_replaces(standin, mend, norm, says):
    module = standin(*FILE)
    found = mend("zimage_attention", module)
    assert found.verdict == "needed" and "reads qk_norm" in found.reason
    assert module.ComfyNunchakuZImageAttention(module.JointAttention(2, norm), rank=32).forward(3) == (6, says)


def test_what_the_pack_sets_itself_stays(standin, mend):
    module = standin(*FILE, ("orig_attn.heads", "5"))
    mend("zimage_attention", module)
    assert module.ComfyNunchakuZImageAttention(module.JointAttention(2, True)).heads == 5


@pytest.mark.parametrize("change", [
    ("self.heads = orig_attn.heads", "self.heads, self.qk_norm = orig_attn.heads, orig_attn.qk_norm"),
    ("return super().forward(x)", "return self.heads * x"),
])
def test_a_pack_that_copies_it_or_has_a_forward_of_its_own_is_left_alone(standin, mend, change):
    assert mend("zimage_attention", standin(*FILE, change)).verdict == "not-needed"
