"""The doctor's table of known breaks for what is on disk."""

import json

import pytest

from qpatch.cli import doctor as command
from qpatch.doctor import known_breaks
from qpatch.hooks.compat import known


@pytest.fixture
def whole(machine):
    """A machine with ComfyUI 0.24.0, nunchaku, comfy-kitchen and the node packs of the table."""
    machine.program("0.24.0")
    machine.nunchaku()
    machine.distribution("comfy-kitchen", "0.2.31")
    machine.pack()
    machine.pack("loader", name="ComfyUI-QwenImageLoraLoader", version="2.5.7")
    machine.pack("tools.disabled", name="comfyui-hswq-loader-and-tools", version="3.4.0")
    return machine


def test_the_versions_come_from_disk_and_disabled_packs_are_left_out(whole):
    assert known_breaks.versions(whole.with_comfyui()) == {
        "comfyui": "0.24.0", "nunchaku": "1.2.1", "comfy-kitchen": "0.2.31", "comfyui-nunchaku": "1.2.1",
        "comfyui-qwenimageloraloader": "2.5.7",
    }


def test_the_verdict_counts_what_the_table_lists(whole):
    rows = known_breaks.rows(whole.with_comfyui())
    verdict = known_breaks.known_breaks(whole.with_comfyui())
    assert len(rows) == len(known.BREAKS) and f"of {len(rows)} known breaks" in verdict.found
    assert f"{sum(row.state == 'mended' for row in rows)} are here and mended" in verdict.found


def test_without_a_comfyui_folder_there_is_no_table(machine):
    assert known_breaks.rows(machine.context()) == []
    assert known_breaks.known_breaks(machine.context()).verdict == "skipped"


def test_nothing_counts_as_mended_while_the_import_hook_is_not_live(whole, inactive):
    rows = known_breaks.rows(whole.with_comfyui())
    assert "mended" not in {row.state for row in rows}
    assert any("the import hook is not live" in row.why for row in rows)


def test_a_hook_that_is_switched_off_is_named(whole, monkeypatch):
    monkeypatch.setenv("QPATCH_DISABLE", "comfy-compat-rotary")
    (row,) = [row for row in known_breaks.rows(whole.with_comfyui()) if "apply_rotary_emb" in row.what]
    assert (row.state, row.why) == ("not mended", "comfy-compat-rotary: QPATCH_DISABLE names it")


def test_the_command_prints_what_is_here_and_json_has_all(whole, capsys):
    rows = known_breaks.rows(whole.with_comfyui())
    command._show_breaks(rows)
    printed = " ".join(capsys.readouterr().out.split())
    for row in rows:
        assert (f"{row.what}: {row.why}" in printed) is (row.state != "not needed"), row
    assert json.loads(json.dumps([vars(row) for row in rows]))[0]["state"]
