"""The table of known breaks for the versions of an installation."""

import pytest

from qpatch import catalogue
from qpatch.hooks.compat import known
from qpatch.hooks.compat.known import BREAKS, MENDED, NOT_MENDED, NOT_NEEDED, TITLES, breaks
from qpatch.repairs import PREFIX, REPAIRS

NEWEST = {"comfyui": "0.33.0", "comfyui-nunchaku": "1.2.1", "nunchaku": "1.2.1", "comfy-kitchen": "0.2.31"}


def _row(versions, text):
    (row,) = [row for row in breaks(versions) if text in row.what]
    return row


def test_every_known_break_is_answered_for_every_installation():
    for versions in ({}, NEWEST, dict.fromkeys(TITLES, "0")):
        assert len(breaks(versions)) == len(BREAKS)


@pytest.mark.parametrize("version, state", [
    ("0.22.0", NOT_NEEDED), ("0.23.0", MENDED), ("0.24.0", MENDED), ("0.24.1", NOT_NEEDED), ("0.25.0", NOT_NEEDED),
])
def test_a_break_of_a_window_of_versions_is_there_in_the_window_only(version, state):
    assert _row({**NEWEST, "comfyui": version}, "apply_rotary_emb").state == state


def test_what_is_not_installed_spares_its_breaks_and_is_named():
    row = _row({"comfyui": "0.33.0"}, "a batch of images")
    assert (row.state, row.why) == (NOT_NEEDED, "ComfyUI-nunchaku is not here")


def test_an_older_pack_is_spared_what_came_later_and_has_what_was_mended_since():
    older = {**NEWEST, "comfyui-nunchaku": "1.1.0"}
    assert _row(older, "a batch of images").why == "ComfyUI-nunchaku 1.1.0 is older than 1.2.0"
    assert _row(older, "qk_norm").state == MENDED
    assert _row(NEWEST, "qk_norm").why == "ComfyUI-nunchaku 1.2.1 is newer than 1.1.0"


def test_a_break_without_a_hook_says_what_to_do():
    row = _row({**NEWEST, "comfyui-qwenimageloraloader": "2.5.7"}, "modulation layers")
    assert row.state == NOT_MENDED and "ComfyUI's own LoRA loader" in row.why


def test_versions_newer_than_any_that_was_tried_are_taken_to_have_what_nobody_mended():
    assert _row({**NEWEST, "comfyui": "0.99.0"}, "stops the workflow").state == MENDED


def test_a_version_that_is_no_number_is_taken_to_have_the_break():
    assert _row({**NEWEST, "comfyui": "nightly"}, "apply_rotary_emb").state == MENDED


def test_the_condition_that_versions_do_not_show_is_said():
    assert _row(NEWEST, "'dtype' while").what.endswith("(with dynamic VRAM on)")


def test_only_hooks_of_this_release_count_as_a_mend(monkeypatch):
    monkeypatch.setattr(catalogue, "HOOKS", ())
    assert MENDED not in {row.state for row in known.breaks(NEWEST)}


def test_a_hook_that_is_off_mends_nothing_and_says_why():
    rows = breaks(NEWEST, {"comfy-compat-zimage-batch": "QPATCH_DISABLE names it"})
    (row,) = [row for row in rows if "a batch of images" in row.what]
    assert (row.state, row.why) == (NOT_MENDED, "comfy-compat-zimage-batch: QPATCH_DISABLE names it")


def test_every_repair_whose_break_was_seen_has_a_row():
    named = {hook for entry in BREAKS for hook in entry.hooks}
    # These mend a call that no released combination makes by itself.
    inner = {"disabled-list", "original-weights", "quant-parameter"}
    assert {PREFIX + thing for thing in REPAIRS if thing not in inner} <= named


def test_each_break_without_a_hook_has_a_remedy_and_each_names_known_components():
    for entry in BREAKS:
        assert entry.hooks or entry.remedy, entry.what
        assert set(entry.where) <= set(TITLES), entry.what
