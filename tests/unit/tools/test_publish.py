"""Outputs appear whole or not at all, never over an input, and over nothing else unasked."""

import os
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from qpatch.lora.publish import WouldOverwrite, publish


def writing(text):
    return lambda path: path.write_text(text)


def failing(path):
    path.write_text("half of it")
    raise RuntimeError("no space left")


def test_a_file_appears_with_its_content(tmp_path):
    assert publish(tmp_path / "out", writing("new")) == tmp_path / "out"
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (tmp_path / "out").read_text() == "new"


def test_nobody_who_looks_for_files_by_their_ending_finds_one_in_the_making(tmp_path):
    def write(path):
        path.write_text("half of it")
        seen.extend(path for path in tmp_path.rglob("*") if path.is_file())

    seen = []
    publish(tmp_path / "style.safetensors", write)
    assert len(seen) == 1 and not any("safetensors" in part for part in seen[0].relative_to(tmp_path).parts)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("force", [False, True])
def test_a_failure_leaves_nothing_and_the_old_file_as_it_was(tmp_path, force, error):
    def stopped(path):
        path.write_text("half of it")
        raise error

    if force:
        (tmp_path / "out").write_text("old")
    with pytest.raises(error):
        publish(tmp_path / "out", stopped, force=force)
    assert [path.read_text() for path in tmp_path.iterdir()] == (["old"] if force else [])


def test_an_existing_file_is_only_replaced_when_asked(tmp_path):
    (tmp_path / "out").write_text("old")
    with pytest.raises(WouldOverwrite, match="--force"):
        publish(tmp_path / "out", writing("new"))
    assert (tmp_path / "out").read_text() == "old"
    publish(tmp_path / "out", writing("new"), force=True)
    assert (tmp_path / "out").read_text() == "new"


def test_a_file_that_appears_meanwhile_is_not_written_over(tmp_path):
    def slowly(path):
        path.write_text("new")
        (tmp_path / "out").write_text("somebody else's")

    with pytest.raises(WouldOverwrite):
        publish(tmp_path / "out", slowly)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["somebody else's"]


@pytest.mark.parametrize("kind", ["itself", "symbolic link", "hard link", "link to its folder", "another spelling"])
def test_an_input_is_never_written_over_also_through_links(tmp_path, kind):
    source = tmp_path / "in"
    source.write_text("input")
    out = tmp_path / "out"
    if kind == "symbolic link":
        out.symlink_to(source)
    elif kind == "hard link":
        os.link(source, out)
    elif kind == "link to its folder":
        (tmp_path / "folder").symlink_to(tmp_path)
        out = tmp_path / "folder" / "in"
    else:
        out = source if kind == "itself" else tmp_path / "." / "x" / ".." / "in"
        (tmp_path / "x").mkdir()
    for force in (False, True):
        with pytest.raises(WouldOverwrite, match="input"):
            publish(out, writing("new"), inputs=[source], force=force)
    assert source.read_text() == "input"


def test_a_link_is_followed_and_stays_a_link(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    publish(tmp_path / "link", writing("new"), force=True)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"


def test_a_folder_or_a_place_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(IsADirectoryError):
        publish(tmp_path, writing("new"), force=True)
    with pytest.raises(FileNotFoundError, match="no folder"):
        publish(tmp_path / "gone" / "out", writing("new"))


@pytest.mark.skipif(os.name != "posix", reason="rights are POSIX")
def test_the_rights_are_those_of_a_new_file_or_of_the_replaced_one(tmp_path):
    old = os.umask(0o027)
    try:
        publish(tmp_path / "out", writing("new"))
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o640
    os.chmod(tmp_path / "out", 0o604)
    publish(tmp_path / "out", writing("newer"), force=True)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o604


def test_without_hard_links_the_file_is_moved(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("not supported")

    monkeypatch.setattr(os, "link", refuse)
    publish(tmp_path / "out", writing("new"))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["new"]
    with pytest.raises(WouldOverwrite):
        publish(tmp_path / "out", writing("newer"))


def test_where_no_file_can_be_made_the_folder_is_named(tmp_path, monkeypatch):
    def refuse(path, mode):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError) as refused:
        publish(tmp_path / "out", writing("new"))
    assert str(refused.value) == f"no file can be made in {tmp_path}: Permission denied"


#: Writes half of a file, says so, and goes on once it is told to.
WRITER = """
    import sys
    from qpatch.lora.publish import publish

    def slowly(path):
        path.write_text("half of it")
        print("half", flush=True)
        sys.stdin.readline()
        path.write_text("all of it")

    publish(sys.argv[1], slowly)
"""


@pytest.fixture
def half_done(tmp_path):
    """A process that stands in the middle of writing ``slow``."""
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path / "slow")],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "half\n"
        yield writer
        writer.kill()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="Windows does not tell which folders are in use")
def test_what_a_killed_process_left_behind_is_removed_by_the_next_write_to_that_folder(tmp_path, half_done):
    half_done.kill()
    half_done.wait()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".qpatch-") and names(left) == ["unfinished"]
    publish(tmp_path / "out", writing("new"))
    assert names(tmp_path) == ["out"]


def test_what_a_living_process_is_writing_is_left_alone(tmp_path, half_done):
    publish(tmp_path / "out", writing("new"))
    half_done.communicate("go on\n", timeout=60)
    assert names(tmp_path) == ["out", "slow"] and (tmp_path / "slow").read_text() == "all of it"


def test_hidden_files_and_folders_of_others_are_left_alone(tmp_path):
    (tmp_path / ".qpatch-notes.tmp").mkdir()
    (tmp_path / f".qpatch-{'0' * 16}.tmp").write_text("no folder")
    before = names(tmp_path)
    publish(tmp_path / "out", writing("new"))
    assert names(tmp_path) == [*before, "out"]


def test_writers_to_one_folder_do_not_take_each_other_for_dead(tmp_path, monkeypatch):
    # The disk would make each of them wait, and never two of them stand in the same place.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    problems = []

    def write(number):
        try:
            for turn in range(150):
                publish(tmp_path / f"{number}-{turn}", writing("new"))
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert problems == [] and len(names(tmp_path)) == 600
