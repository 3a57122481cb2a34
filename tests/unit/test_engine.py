"""What a hook comes to when its target is met: every state, reached in the ways it is reached in use."""

import logging
import sys
import types

import pytest

from qpatch import catalogue, engine, finder, finding, states, targets, toggles
from qpatch.patching import Supply, Wrap

NAME = "stand_in_target"


@pytest.fixture
def target(monkeypatch):
    """A module that has been imported, called NAME, with a function f."""
    module = types.ModuleType(NAME)
    module.f = lambda x: x
    monkeypatch.setitem(sys.modules, NAME, module)
    return module


@pytest.fixture
def hook(monkeypatch):
    """``hook(...)`` makes the one hook of the catalogue; its implementation examines and patches as told."""
    def make(*, examine=lambda module: finding.needed("f is one too small"), patches=None, **fields):
        implementation = types.ModuleType("stand_in_hook")
        implementation.examine = examine
        implementation.patches = patches or (lambda module: [Wrap(module, "f", lambda old: lambda x: old(x) + 1)])
        monkeypatch.setitem(sys.modules, "stand_in_hook", implementation)
        fields = {"name": "probe", "targets": (catalogue.Target(NAME, "stand_in_hook", ("f",)),), **fields}
        made = catalogue.Hook(mends="a stand-in", **fields)
        for module in (targets, states, toggles):
            monkeypatch.setattr(module, "HOOKS", (made,))
        for pattern in made.targets:
            monkeypatch.setitem(finder.TARGETS, pattern.pattern.rpartition(".")[2], (pattern.pattern,))
        return made

    monkeypatch.setattr(states, "_attempts", {})
    monkeypatch.setattr(finder, "unwatched", {})
    monkeypatch.setattr(engine, "_complained", True)
    for variable in [name for name in __import__("os").environ if name.startswith("QPATCH")]:
        monkeypatch.delenv(variable)
    return make


def raise_(error):
    raise error


def test_waiting_until_the_target_is_imported(hook):
    assert states.overall(hook()) == ("waiting", f"not imported in this process: {NAME}")


def test_applied_with_the_reason_that_the_hook_found(hook, target):
    probe = hook()
    assert engine.loaded(NAME, target) is None
    assert target.f(1) == 2
    assert states.overall(probe) == ("applied", "f is one too small")


def test_not_needed_leaves_the_target_alone(hook, target):
    probe, before = hook(examine=lambda module: finding.not_needed("f is right")), dict(vars(target))
    engine.loaded(NAME, target)
    assert states.overall(probe) == ("not-needed", "f is right")
    assert vars(target) == before


def test_incompatible_when_the_hook_says_so_or_a_name_is_missing(hook, target):
    probe = hook(examine=lambda module: finding.incompatible("f takes another argument"))
    engine.loaded(NAME, target)
    assert states.overall(probe) == ("incompatible", "f takes another argument")
    del target.f
    engine.loaded(NAME, target)
    assert states.overall(probe) == ("incompatible", f"{NAME} does not define f")


@pytest.mark.parametrize("variable, value, default, reason", [
    ("QPATCH_DISABLE", "other, probe", True, "QPATCH_DISABLE names it"),
    ("QPATCH_ENABLE", "other", False, "off by default; QPATCH_ENABLE=probe turns it on"),
])
def test_disabled_by_a_toggle(hook, target, monkeypatch, variable, value, default, reason):
    probe = hook(default=default)
    monkeypatch.setenv(variable, value)
    assert states.overall(probe) == ("disabled", reason)
    engine.loaded(NAME, target)
    assert states.overall(probe) == ("disabled", reason)
    assert target.f(1) == 1


def test_a_hook_that_is_off_by_default_can_be_enabled(hook, target, monkeypatch):
    hook(default=False)
    monkeypatch.setenv("QPATCH_ENABLE", "probe")
    engine.loaded(NAME, target)
    assert target.f(1) == 2


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), type("Odd", (BaseException,), {})("odd")])
def test_failed_with_the_traceback_and_nothing_changed(hook, target, caplog, error):
    probe = hook(patches=lambda module: [Supply(module, "g", 1), Wrap(module, "f", lambda old: raise_(error))])
    before = dict(vars(target))
    with caplog.at_level(logging.INFO, "qpatch"):
        assert engine.loaded(NAME, target) is None
    assert vars(target) == before
    (attempt,) = states.attempts(probe)
    assert attempt.state == "failed" and "in raise_" in attempt.error
    assert attempt.reason.endswith(str(error))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "probe failed on stand_in_target and left it as it was" in caplog.text


def test_an_interrupt_is_the_user_s_and_goes_through(hook, target):
    hook(examine=lambda module: raise_(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        engine.loaded(NAME, target)


def test_strict_hands_the_error_to_the_import_and_keeps_the_state(hook, target, monkeypatch):
    probe = hook(examine=lambda module: raise_(ValueError("no")))
    monkeypatch.setenv("QPATCH_STRICT", "1")
    with pytest.raises(ValueError, match="no"):
        finder.load_shadow().executed(NAME, target)
    assert states.overall(probe)[0] == "failed"


def test_one_hook_that_fails_does_not_keep_the_others_from_their_turn(hook, target, monkeypatch):
    good = hook()
    bad = catalogue.Hook("bad", "nothing", (catalogue.Target(NAME, "no_such_implementation"),))
    for module in (targets, states, toggles):
        monkeypatch.setattr(module, "HOOKS", (bad, good))
    engine.loaded(NAME, target)
    assert target.f(1) == 2
    assert states.overall(bad) == ("failed", "ModuleNotFoundError: No module named 'no_such_implementation'")
    assert states.overall(good)[0] == "applied"


def test_lost_names_who_stands_there_and_comes_back_with_the_patch(hook, target):
    probe = hook()
    engine.loaded(NAME, target)
    ours, target.f = target.f, abs
    assert states.overall(probe) == ("lost", f"{NAME}.f is now builtins.builtin_function_or_method")
    target.f = ours
    assert states.overall(probe)[0] == "applied"


def test_the_state_that_most_wants_a_look_is_the_hook_s(hook, target, monkeypatch):
    probe = hook(targets=(catalogue.Target(f"*.{NAME}", "stand_in_hook", ("f",)),))
    other = types.ModuleType("a")
    other.f = lambda x: x
    engine.loaded(f"a.{NAME}", other)
    assert states.overall(probe)[0] == "applied"
    other.f = abs
    engine.loaded(f"b.{NAME}", target)
    assert [attempt.state for attempt in states.attempts(probe)] == ["lost", "applied"]
    assert states.overall(probe)[0] == "lost"


def test_what_we_supplied_does_not_make_the_target_fine_by_itself_when_it_is_reloaded(hook, target):
    probe = hook(
        examine=lambda module: finding.not_needed("") if hasattr(module, "g") else finding.needed("no g is there"),
        patches=lambda module: [Supply(module, "g", lambda: 1)],
    )
    for _ in range(2):
        engine.loaded(NAME, target)
        assert states.overall(probe) == ("applied", "no g is there")
    del target.g
    assert states.overall(probe)[0] == "lost"


def test_a_hook_that_offers_its_own_target_again_has_one_turn(hook, target):
    turns = []

    def examine(module):
        turns.append(module)
        engine.loaded(NAME, module)
        return finding.needed("")

    hook(examine=examine)
    engine.loaded(NAME, target)
    assert turns == [target] and target.f(1) == 2


def test_a_module_put_into_sys_modules_by_hand_is_mended_at_once_on_activation(hook, target, monkeypatch):
    hook()
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    finder.install()
    finder.install()
    assert target.f(1) == 2


class Raising:
    def __getattr__(self, name):
        raise ZeroDivisionError(name)


@pytest.mark.parametrize("spec", [type(None), int, Raising])
def test_odd_names_and_specs_in_sys_modules_hinder_nothing(hook, target, monkeypatch, spec):
    probe = hook()
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(target, "__spec__", spec())
    monkeypatch.setitem(sys.modules, 5, types.ModuleType("five"))
    finder.install()
    assert target.f(1) == 2 and states.overall(probe)[0] == "applied"


def test_a_module_whose_body_is_running_is_neither_missed_nor_mended(hook, target):
    probe = hook()
    target.__spec__ = types.SimpleNamespace(_initializing=True, loader=None)
    engine.catch_up()
    assert states.overall(probe)[0] == "waiting" and target.f(1) == 1
    target.__spec__._initializing = False
    assert states.overall(probe)[0] == "incompatible"


def test_activation_with_strict_says_what_failed_first_and_still_mends_the_others(hook, target, monkeypatch):
    def examine(module):
        return raise_(ValueError("no")) if module is target else finding.needed("")

    hook(examine=examine, targets=(catalogue.Target(f"*{NAME}", "stand_in_hook", ("f",)),))
    monkeypatch.setitem(finder.TARGETS, NAME, (f"*{NAME}",))
    second = types.ModuleType(f"second.{NAME}")
    second.f = lambda x: x
    monkeypatch.setitem(sys.modules, second.__name__, second)
    monkeypatch.setenv("QPATCH_STRICT", "1")
    with pytest.raises(ValueError, match="no"):
        engine.catch_up()
    assert (target.f(1), second.f(1)) == (1, 2)


def test_an_applied_hook_says_one_line_and_an_internal_one_none(hook, target, caplog):
    for internal, lines in ((False, ["qpatch: probe applied to stand_in_target"]), (True, [])):
        hook(internal=internal)
        caplog.clear()
        with caplog.at_level(logging.INFO, "qpatch"):
            target.f = lambda x: x
            engine.loaded(NAME, target)
        assert caplog.messages == lines


def test_the_snapshot_is_plain_data_about_each_hook(hook, target):
    import json

    hook()
    target.__file__ = "/somewhere/target.py"
    engine.loaded(NAME, target)
    (row,) = json.loads(json.dumps(states.snapshot()))
    assert row == {
        "hook": "probe", "state": "applied", "explanation": "f is one too small", "mends": "a stand-in",
        "targets": [{"module": NAME, "file": "/somewhere/target.py", "state": "applied",
                     "explanation": "f is one too small", "error": None}],
    }
