"""Where ``qpatch enable`` and ``disable`` write, on interpreters that a test makes up."""

import sys
from pathlib import Path

import pytest

from qpatch import cli, places
from qpatch.cli import enable


@pytest.fixture
def interpreter(machine, monkeypatch):
    """A Python with two site folders of its own; qpatch is imported from ``packages/``."""
    package = machine.write("packages/qpatch/__init__.py").resolve()
    first, user = machine.folder / "first", machine.folder / "user"
    first.mkdir()
    monkeypatch.setattr("qpatch.__file__", str(package))
    monkeypatch.setattr(sys, "executable", str(machine.executable))
    monkeypatch.setattr(enable.sysconfig, "get_path", lambda name: str(first))
    monkeypatch.setattr(places, "user_site", lambda: user)
    monkeypatch.setattr(places, "site_folders", lambda: [first, user])
    return machine


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_a_copy_elsewhere_is_made_known_in_the_first_site_folder(interpreter, capsys):
    assert cli.main(["enable"]) == 0
    first = interpreter.folder / "first"
    assert (first / "qpatch.pth").read_text().splitlines()[0] == str(interpreter.folder / "packages")
    assert str(first / "qpatch.pth") in capsys.readouterr().out
    assert cli.main(["disable"]) == 0 and files(first) == []


def test_a_copy_in_the_user_site_is_enabled_there_and_without_a_path_line(interpreter, monkeypatch):
    monkeypatch.setattr("qpatch.__file__", str(interpreter.write("user/qpatch/__init__.py")))
    assert cli.main(["enable"]) == 0
    assert (interpreter.folder / "user" / "qpatch.pth").read_text() == "import qpatch; qpatch.activate()\n"
    assert files(interpreter.folder / "first") == []


def test_an_editable_install_needs_no_path_line(interpreter):
    interpreter.write("first/__editable__.qpatch-0.1.0.pth", "import __editable___qpatch_0_1_0_finder\n")
    assert cli.main(["enable"]) == 0
    assert (interpreter.folder / "first" / "qpatch.pth").read_text() == "import qpatch; qpatch.activate()\n"


def test_the_user_site_is_written_on_request_and_disable_names_what_it_leaves(interpreter, capsys):
    assert cli.main(["enable", "--user"]) == 0
    assert files(interpreter.folder / "user") == ["qpatch.pth", "qpatch.start"]
    assert cli.main(["disable"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert f"still active through {interpreter.folder / 'user' / 'qpatch.pth'}" in shown
    assert cli.main(["disable", "--user"]) == 0 and files(interpreter.folder / "user") == []


def test_an_interpreter_without_user_site_refuses_it(interpreter, monkeypatch, capsys):
    monkeypatch.setattr(places, "site_folders", lambda: [interpreter.folder / "first"])
    assert cli.main(["enable", "--user"]) == 1
    assert "does not use a user site-packages" in capsys.readouterr().err


def test_an_embedded_python_that_reads_no_pth_files_is_told_the_line_it_lacks(interpreter, capsys):
    pth = interpreter.write("python/python312._pth", "python312.zip\n.\n#import site\n")
    assert cli.main(["enable"]) == 1
    assert f"add the line 'import site' to {pth}" in " ".join(capsys.readouterr().out.split())
    pth.write_text("python312.zip\n.\nimport site\n")
    assert cli.main(["enable"]) == 0
