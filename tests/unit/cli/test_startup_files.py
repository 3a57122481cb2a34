"""Writing and removing qpatch.pth and qpatch.start."""

import io
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from qpatch import startup

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", startup.NAMES)
def test_what_is_written_is_what_the_wheel_ships(name):
    assert startup.text_of(name) == (ROOT / name).read_text(encoding="ascii")


def test_writing_twice_changes_nothing(tmp_path):
    assert [what for _, what in startup.write(tmp_path)] == ["written", "written"]
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert [what for _, what in startup.write(tmp_path)] == ["unchanged", "unchanged"]
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert sorted(before) == sorted(startup.NAMES)


def test_a_package_elsewhere_gets_a_path_line_before_the_unchanged_import_line(tmp_path):
    startup.write(tmp_path, Path("/opt/packages"))
    assert (tmp_path / "qpatch.pth").read_text().splitlines() == ["/opt/packages", "import qpatch; qpatch.activate()"]
    assert (tmp_path / "qpatch.start").read_text() == "qpatch:activate\n"


@pytest.mark.parametrize("name", ["t\u00e4r get \u96ea", "it's \u96ea", "\u00e4 \"'"])
@pytest.mark.parametrize("python", [(3, 12), (3, 13)])
def test_a_folder_outside_ascii_is_read_in_every_locale(tmp_path, monkeypatch, name, python):
    monkeypatch.setattr(startup.sys, "version_info", python)
    folder = tmp_path / name
    startup.write(tmp_path, folder)
    written = (tmp_path / "qpatch.pth").read_bytes()
    # From 3.13 on site reads UTF-8 whatever the locale; before, one byte too many ends the interpreter.
    lines = written.decode("utf-8" if python == (3, 13) else "ascii").splitlines()
    if python < (3, 13):
        scope = {"sys": SimpleNamespace(path=["/first"]), "__builtins__": {"__import__": lambda *_: scope["sys"]}}
        for _ in range(2):
            exec(lines[0], scope)
        assert scope["sys"].path == ["/first", str(folder)]
    else:
        assert lines[0] == str(folder)
    text = startup.read(tmp_path / "qpatch.pth")
    assert startup.ours(text) and startup.path_lines(text) == [folder]
    assert [what for _, what in startup.write(tmp_path, folder)] == ["unchanged", "unchanged"]
    assert len(startup.remove(tmp_path)) == 2


def test_a_folder_name_that_is_no_text_is_refused(tmp_path):
    with pytest.raises(startup.StartupError, match="UTF-8 locale"):
        startup.write(tmp_path, Path("/opt/\udcc3"))
    assert list(tmp_path.iterdir()) == []


def test_removing_takes_both_files_and_a_second_time_none(tmp_path):
    startup.write(tmp_path, Path("/opt/packages"))
    (tmp_path / "other.pth").write_text("import other\n")
    assert [path.name for path in startup.remove(tmp_path)] == list(startup.NAMES)
    assert startup.remove(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["other.pth"]


@pytest.mark.parametrize("text", ["import os; os.getcwd()\n", "import qpatch; qpatch.activate()\nimport more\n",
                                  "relative/folder\nimport qpatch; qpatch.activate()\n"])
@pytest.mark.parametrize("action", [startup.write, startup.remove])
def test_a_file_with_other_lines_is_never_touched(tmp_path, text, action):
    (tmp_path / "qpatch.pth").write_text(text)
    with pytest.raises(startup.StartupError, match="qpatch did not write"):
        action(tmp_path)
    assert (tmp_path / "qpatch.pth").read_text() == text
    assert not (tmp_path / "qpatch.start").exists()


@pytest.mark.parametrize("name", startup.NAMES)
@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_file_is_filled_or_removed(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    startup.write(tmp_path)
    assert (tmp_path / name).read_text() == startup.text_of(name)
    (tmp_path / name).write_text(text)
    assert len(startup.remove(tmp_path)) == 2 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("action", [startup.write, startup.remove])
@pytest.mark.parametrize("name", startup.NAMES)
def test_a_folder_of_that_name_is_refused_and_left(tmp_path, name, action):
    (tmp_path / name).mkdir()
    with pytest.raises(startup.StartupError, match="is a folder"):
        action(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_folder_that_cannot_be_written_is_refused_and_left_clean(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(startup.tempfile, "mkstemp", refuse)
    with pytest.raises(startup.StartupError, match=r"cannot write .*qpatch\.pth \(Permission denied\)"):
        startup.write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_file_and_no_temporary_one(tmp_path, monkeypatch):
    startup.write(tmp_path)

    class Full(io.RawIOBase):
        def write(self, data):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(startup.os, "fdopen", lambda handle, mode: (os.close(handle), Full())[1])
    with pytest.raises(startup.StartupError, match="No space left"):
        startup.write(tmp_path, Path("/opt/packages"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(startup.NAMES)
    assert (tmp_path / "qpatch.pth").read_text() == startup.text_of("qpatch.pth")


@pytest.mark.parametrize(("status", "expected"), [
    (SimpleNamespace(), False),
    (SimpleNamespace(st_flags=0), False),
    (SimpleNamespace(st_flags=getattr(stat, "UF_HIDDEN", 0x8000)), True),
    (SimpleNamespace(st_file_attributes=stat.FILE_ATTRIBUTE_ARCHIVE), False),
    (SimpleNamespace(st_file_attributes=stat.FILE_ATTRIBUTE_HIDDEN | stat.FILE_ATTRIBUTE_ARCHIVE), True),
])
def test_the_hidden_flag_of_macos_and_of_windows_is_seen(status, expected):
    assert startup.hidden(status) is expected


@pytest.mark.parametrize(("python", "names"), [
    ((3, 10), {"qpatch.pth"}), ((3, 14), {"qpatch.pth"}), ((3, 15), {"qpatch.pth", "qpatch.start"}),
    ((3, 18), {"qpatch.start"}),
])
def test_which_file_is_read_depends_on_the_python(tmp_path, python, names):
    startup.write(tmp_path)
    assert {path.name for path in startup.present([tmp_path], python)} == names


def test_undecodable_bytes_do_not_stop_the_reading(tmp_path):
    (tmp_path / "qpatch.pth").write_bytes(b"\xff\xfe import qpatch")
    assert not startup.ours(startup.read(tmp_path / "qpatch.pth"))
