"""The rule for arguments that an override does not know, over four ages of one method."""

import pytest

from qpatch.hooks.compat.calls import fit, lacking


def _base(self, device=None, weights=True, fresh=False, speed=None):
    return "ComfyUI's own", device, weights, fresh, speed


def _oldest(self, device):
    return "override", device


def _old(self, device=None, weights=True):
    return "override", device, weights


def _new(self, device=None, weights=True, fresh=False, speed=None):
    return "override", device, weights, fresh, speed


def _open(self, device=None, **others):
    return "override", device, others


class Patcher:
    dynamic = False


@pytest.mark.parametrize("override, missing", [
    (_oldest, ["weights", "fresh", "speed"]), (_old, ["fresh", "speed"]), (_new, []), (_open, []),
])
def test_what_an_override_lacks_is_read_from_the_signatures(override, missing):
    assert lacking(override, _base) == missing


@pytest.mark.parametrize("call", [
    lambda f: f(Patcher(), "cpu", False), lambda f: f(Patcher(), device="cpu", weights=False),
])
def test_known_arguments_reach_the_override_by_position_and_by_name(call):
    assert call(fit(_old, _base)) == ("override", "cpu", False)


def test_an_unknown_argument_with_comfyui_s_default_is_left_out():
    assert fit(_old, _base)(Patcher(), "cpu", fresh=False, speed=None) == ("override", "cpu", True)


def test_an_unknown_argument_that_the_object_meets_anyway_is_left_out():
    meets = {"fresh": lambda self, value: not self.dynamic}
    assert fit(_old, _base, inert=meets)(Patcher(), "cpu", fresh=True) == ("override", "cpu", True)


def test_an_argument_that_the_object_does_not_meet_is_not_dropped():
    dynamic = Patcher()
    dynamic.dynamic = True
    with pytest.raises(TypeError, match=r"fresh=True"):
        fit(_old, _base, inert={"fresh": lambda self, value: not self.dynamic})(dynamic, "cpu", fresh=True)


def test_comfyui_s_own_method_serves_the_call_where_that_is_right():
    call = fit(_old, _base, through=True)
    assert call(Patcher(), "cpu", weights=False, fresh=True) == ("ComfyUI's own", "cpu", False, True, None)


def test_an_argument_that_nobody_knows_is_refused_with_its_name():
    with pytest.raises(TypeError, match=r"Patcher._old\(\) does not know pace=2"):
        fit(_old, _base, through=True)(Patcher(), pace=2)


def test_an_argument_added_later_passes_through_an_override_that_takes_anything():
    assert fit(_open, _base)(Patcher(), "cpu", pace=2) == ("override", "cpu", {"pace": 2})


def test_a_missing_required_argument_is_still_an_error():
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        fit(_oldest, _base)(Patcher(), fresh=False)


def test_false_is_not_taken_for_a_default_of_zero():
    with pytest.raises(TypeError, match="weights=1"):
        fit(_oldest, _base)(Patcher(), "cpu", weights=1)
