"""What a file says cannot give orders to a terminal, or make two lines of one."""

import pytest

from qpatch.lora import LoraError
from qpatch.lora.printable import printable, short


@pytest.mark.parametrize("text", ["style.safetensors", "画风 ohwx", "crème brûlée", "a\u3000b\u00a0c", "👩\u200d🎨"])
def test_what_people_write_stays_as_it_is(text):
    assert printable(text) == text


@pytest.mark.parametrize(("text", "shown"), [
    ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"), ("a\nqpatch: all is well", r"a\nqpatch: all is well"),
    ("\x9b31m", r"\x9b31m"), ("\u202eevil", r"\u202eevil"), ("\ud800", r"\ud800"), ("a\u2028b", r"a\u2028b"),
    ("\x00\x07", r"\x00\x07"),
])
def test_controls_line_ends_and_direction_marks_are_written_out(text, shown):
    assert printable(text) == shown


def test_what_is_too_long_loses_its_middle():
    text = short("x" * 500 + "y" * 500)
    assert len(text) <= 200 and text.startswith("xxx") and text.endswith("yyy") and "..." in text


def test_a_refusal_is_one_line_whatever_the_key_is():
    assert str(LoraError("no layer", file="a\x1b.safetensors", key="x\ny")) == r"a\x1b.safetensors: x\ny: no layer"
