"""The trial of a block's forward: in which order it takes the rows of its modulation layers."""

from types import ModuleType

import pytest
import torch

from qpatch.hooks import qwen_modulation
from qpatch.hooks.lora_loader.options import ROWS


def block(rows):
    """A block class whose forward puts its modulation rows in planar order by ``rows``."""

    class NunchakuQwenImageTransformerBlock(torch.nn.Module):
        def forward(self, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, temb, **_):
            img, txt = rows(self.img_mod(temb)), rows(self.txt_mod(temb))
            streams = (self.img_norm1, hidden_states, img), (self.txt_norm1, encoder_hidden_states, txt)
            states = [norm(x) * (mod.chunk(6, -1)[1] + self.scale_shift) + mod.chunk(6, -1)[0]
                      for norm, x, mod in streams]
            return self.attn(hidden_states=states[0], encoder_hidden_states=states[1])

    return NunchakuQwenImageTransformerBlock


def turned(modulation):
    return modulation.unflatten(-1, (-1, 6)).transpose(1, 2).flatten(1)


def module(cls):
    made = ModuleType("models.qwenimage")
    made.NunchakuQwenImageTransformerBlock = cls
    return made


def test_a_block_that_turns_interleaved_rows_is_marked_and_the_mark_comes_off():
    cls = block(turned)
    assert qwen_modulation.examine(module(cls)).verdict == "needed"
    (patch,) = qwen_modulation.patches(module(cls))
    patch.apply()
    assert getattr(cls, ROWS) == "interleaved" and patch.lost() is None
    patch.revert()
    assert not hasattr(cls, ROWS)


@pytest.mark.parametrize("rows, order", [
    (lambda modulation: modulation, "planar"), (lambda modulation: modulation.flip(-1), "another way")])
def test_a_block_that_takes_them_otherwise_is_incompatible_and_the_order_is_named(rows, order):
    found = qwen_modulation.examine(module(block(rows)))
    assert found.verdict == "incompatible" and order in found.reason


def test_a_block_that_cannot_be_tried_is_incompatible_with_the_error():
    cls = block(turned)
    cls.forward = lambda self, **_: self.unheard_of
    found = qwen_modulation.examine(module(cls))
    assert found.verdict == "incompatible" and "unheard_of" in found.reason


def test_a_block_that_calls_no_attention_is_incompatible():
    cls = block(turned)
    cls.forward = lambda self, **_: None
    assert "does not call attn" in qwen_modulation.examine(module(cls)).reason
