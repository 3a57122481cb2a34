"""The environment variables: what they switch, and what is said about those that qpatch does not know."""

import io
import logging
import sys

import pytest

from qpatch import catalogue, engine, log, states, toggles


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith("QPATCH")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name, value, line", [
    ("QPATCH_DISABLE", "lazy-liner", "QPATCH_DISABLE: there is no hook 'lazy-liner'; did you mean 'lazy-linear'?"),
    ("QPATCH_ENABLE", "zimage_fuse, lazy-linear",
     "QPATCH_ENABLE: there is no hook 'zimage_fuse'; did you mean 'zimage-fuse'?"),
    ("QPATCH_LOG", "verbose", "QPATCH_LOG: 'verbose' is not a level; known: debug, info, warning, quiet"),
    ("QPATCH_LOG", "warn", "QPATCH_LOG: 'warn' is not a level; did you mean 'warning'?"),
    ("QPATCH_STRICT", "maybe", "QPATCH_STRICT: 'maybe' is neither 1|on|true|yes nor 0|off|false|no"),
    ("QPATCH_MAX_RANK", "-1", "QPATCH_MAX_RANK: '-1' is not a positive number"),
    ("QPATCH_MAX_RANK", "0", "QPATCH_MAX_RANK: '0' is not a positive number"),
    ("QPATCH_QUANT_LORA", "sid", "QPATCH_QUANT_LORA: 'sid' is none of its values; did you mean 'side'?"),
    ("QPATCH_QUANT_LORA", "7", "QPATCH_QUANT_LORA: '7' is none of its values; known: auto, side, bake"),
    ("QPATCH_DISABEL", "smoke", "QPATCH_DISABEL is not a variable of qpatch; did you mean 'QPATCH_DISABLE'?"),
])
def test_what_is_not_understood_is_named_with_the_nearest_known_name(monkeypatch, name, value, line):
    monkeypatch.setenv(name, value)
    assert toggles.complaints() == [line]


def test_a_name_that_is_like_nothing_gets_the_list_of_those_that_exist(monkeypatch):
    monkeypatch.setenv("QPATCH_DISABLE", "xyzzy")
    (line,) = toggles.complaints()
    listed = line.partition("known: ")[2].split(", ")
    assert listed == [hook.name for hook in catalogue.HOOKS if not hook.internal]


@pytest.mark.parametrize("name, value", [
    ("QPATCH", "1"), ("QPATCH_DISABLE", " lazy-linear ,, zimage-fuse "), ("QPATCH_ENABLE", ""), ("QPATCH_LOG", "DEBUG"),
    ("QPATCH_MAX_RANK", " 64 "), ("QPATCH_MAX_RANK", ""), ("QPATCH_QUANT_LORA", "Bake"), ("QPATCH_QUANT_LORA", ""),
    ("QPATCH_STRICT", "0"), ("QPATCH_TEST_COMFYUI", "/somewhere"), ("QPATCHWORK", "1"),
])
def test_what_is_understood_or_not_ours_is_passed_over(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert toggles.complaints() == []


def test_a_variable_that_a_hook_declares_is_known(monkeypatch):
    monkeypatch.setattr(toggles, "HOOKS", (catalogue.Hook("probe", "", (), variables={"QPATCH_PROBE": ("1",)}),))
    monkeypatch.setenv("QPATCH_PROBE", "1")
    assert toggles.complaints() == []


def test_complaints_are_said_once(monkeypatch, caplog):
    monkeypatch.setenv("QPATCH_DISABLE", "lazy-liner")
    monkeypatch.setattr(engine, "_complained", False)
    with caplog.at_level(logging.INFO, "qpatch"):
        for _ in range(2):
            engine.loaded("no.target", None)
    assert len(caplog.messages) == 1


def test_the_proof_of_life_cannot_be_switched_off_by_its_name(monkeypatch):
    monkeypatch.setenv("QPATCH_DISABLE", "smoke")
    assert toggles.why_disabled(catalogue.named("smoke")) is None
    assert "there is no hook 'smoke'" in toggles.complaints()[0]


@pytest.mark.parametrize("level, said", [
    ("debug", ["d", "i", "w"]), ("info", ["i", "w"]), ("warning", ["w"]), ("quiet", []),
])
def test_a_level_that_is_asked_for_decides_whatever_the_root_logger_says(monkeypatch, caplog, level, said):
    monkeypatch.setenv("QPATCH_LOG", level)
    logging.getLogger().setLevel(logging.WARNING)
    log.debug("d"), log.info("i"), log.warning("w")
    assert caplog.messages == [f"qpatch: {text}" for text in said]


def test_without_a_level_the_application_s_own_settings_decide(caplog):
    with caplog.at_level(logging.WARNING):
        log.debug("d"), log.info("i"), log.warning("w")
    assert caplog.messages == ["qpatch: w"]


def test_a_level_that_is_asked_for_is_seen_where_logging_has_not_been_set_up(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setenv("QPATCH_LOG", "info")
    for stream, written in ((io.StringIO(), "qpatch: i\n"), (None, None)):
        monkeypatch.setattr(sys, "stderr", stream)
        log.debug("d"), log.info("i")
        assert stream is None or stream.getvalue() == written
    # print() takes standard output where it is given None.
    assert capsys.readouterr().out == ""


def test_off_makes_every_hook_disabled(monkeypatch):
    monkeypatch.setenv("QPATCH", "off")
    assert {states.overall(hook) for hook in catalogue.HOOKS} == {("disabled", "QPATCH=0 turns everything off")}
