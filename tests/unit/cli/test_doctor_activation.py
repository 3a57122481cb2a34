"""Why qpatch is not active: each reason on a machine made up for it."""

import dataclasses

import pytest

from qpatch import doctor, startup
from qpatch.doctor import activation
from qpatch.doctor.context import Context, Flags

pytestmark = pytest.mark.usefixtures("inactive")


def test_active_is_proved_and_not_reasoned(machine, monkeypatch):
    monkeypatch.setattr("qpatch.states.live", lambda: True)
    assert activation.activation(machine.context(environ={"QPATCH": "0"})).verdict == "ok"


@pytest.mark.parametrize("value", ["0", "off", " False "])
def test_the_off_switch_is_a_warning_because_somebody_wanted_it(machine, value):
    verdict = activation.activation(machine.context(environ={"QPATCH": value}))
    assert verdict.verdict == "warn" and "QPATCH=" in verdict.found and verdict.todo == "unset QPATCH"


def test_an_error_at_start_up_is_shown(machine, monkeypatch):
    monkeypatch.setattr("qpatch.activation_error", ImportError("no finder"))
    verdict = activation.activation(machine.context())
    assert verdict.verdict == "problem" and "ImportError: no finder" in verdict.found


def test_no_site_is_named_with_the_way_round_it(machine):
    verdict = activation.activation(machine.context(flags=Flags(no_site=True)))
    assert "-S" in verdict.found and "qpatch run main.py" in verdict.todo


@pytest.mark.parametrize(("text", "said"), [
    ("python312.zip\n.\n#import site\n", "has no line 'import site'"),
    ("python312.zip\nimport site\n", "started with -S"),
])
def test_an_embedded_python_without_import_site_is_told_apart_from_a_plain_minus_S(machine, text, said):
    machine.write("python/python312._pth", text)
    verdict = activation.activation(machine.context(flags=Flags(no_site=True, isolated=True)))
    assert said in verdict.found


@pytest.mark.parametrize("environ", [{"PYTHONPATH": "{0}"}, {"PYTHONPATH": "/nowhere:{0}"}, {}])
def test_an_install_outside_site_packages_is_named_and_enable_offered(machine, environ):
    target = machine.write("target/qpatch/__init__.py").parent
    for name in startup.NAMES:
        (machine.site / name).unlink()
        (target.parent / name).write_text(startup.text_of(name))
    environ = {key: value.format(target.parent) for key, value in environ.items()}
    verdict = activation.activation(machine.context(package=target, environ=environ))
    assert str(target.parent) in verdict.found and "--target" in verdict.found
    assert ("on PYTHONPATH" in verdict.found) == bool(environ)
    assert verdict.todo == f"run: {machine.executable} -m qpatch enable"


def test_an_editable_install_whose_start_up_file_is_gone_is_not_taken_for_one_outside(machine):
    source = machine.write("source/qpatch/__init__.py").parent
    (machine.site / "qpatch.pth").unlink()
    machine.write("site-packages/__editable__.qpatch-0.1.0.pth")
    assert "no qpatch.pth in" in activation.activation(machine.context(package=source)).found


def test_a_missing_start_up_file_is_named(machine):
    (machine.site / "qpatch.pth").unlink()
    verdict = activation.activation(machine.context())
    assert f"no qpatch.pth in {machine.site}" in verdict.found and "enable" in verdict.todo


def test_a_hidden_start_up_file_is_named(machine, monkeypatch):
    monkeypatch.setattr(startup, "hidden", lambda status: True)
    assert "hidden flag" in activation.activation(machine.context()).found


def test_a_start_up_file_with_another_text_is_named(machine):
    machine.write("site-packages/qpatch.pth", "import something_else\n")
    assert "does not hold the line" in activation.activation(machine.context()).found


def test_without_any_reason_it_says_what_it_sees_instead_of_guessing(machine, monkeypatch):
    monkeypatch.setattr("qpatch.states.standing", lambda: None)
    assert "no finder of qpatch" in activation.activation(machine.context()).found
    monkeypatch.setattr("qpatch.states.standing", lambda: "0.1.0")
    monkeypatch.setattr("qpatch.states.finders_ahead", lambda: ["other.Finder"])
    assert "asked before it: other.Finder" in activation.activation(machine.context()).found


def test_the_finder_of_another_copy_is_a_warning(machine, monkeypatch):
    monkeypatch.setattr("qpatch.states.live", lambda: True)
    monkeypatch.setattr("qpatch.states.standing", lambda: "0.0.9")
    verdict = activation.activation(machine.context())
    assert verdict.verdict == "warn" and "qpatch 0.0.9" in verdict.found


def test_a_check_that_fails_says_so_and_the_others_go_on(machine):
    class Broken(dict):
        def get(self, *args):
            raise RuntimeError("out of order")

    found = doctor.examine(dataclasses.replace(machine.context(), environ=Broken()))
    assert list(found) == list(doctor.CHECKS)
    assert "RuntimeError: out of order" in found["activation"].found and found["activation"].verdict == "warn"
    assert found["copies"].verdict == "ok"


def test_the_context_of_this_process_has_the_switches_of_the_command_line():
    assert Context.here().package.name == "qpatch"
    assert Flags(no_site=True, isolated=True, no_user_site=True, ignore_environment=True).switches() == ["-S", "-I"]
    assert Flags(no_user_site=True, ignore_environment=True).switches() == ["-s", "-E"]
