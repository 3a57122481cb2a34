"""A disk that is full while a file is written: one line, exit code 1, nothing left behind, inputs as they were."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import textwrap

import producers
import pytest

from qpatch import cli
from qpatch.lora import publish

resource = pytest.importorskip("resource", reason="limits of file sizes are POSIX's")

#: The commands that write a file, and the file.
COMMANDS = {
    "convert": ["convert", "style.safetensors", "--to", "kohya", "-o", "out.safetensors"],
    "convert over an old file": ["convert", "style.safetensors", "--to", "kohya", "-o", "old.safetensors", "--force"],
    "merge": ["merge", "style.safetensors", "other.safetensors", "-o", "out.safetensors"],
    "plot as text": ["inspect", "style.safetensors", "--plot", "out.txt"],
    "plot as a page": ["inspect", "style.safetensors", "--plot", "out.html"],
}

#: Runs the commands, each with a limit of the size of files, at which a write fails as on a full disk.
CHILD = """
    import contextlib, io, json, resource, sys
    from qpatch import cli

    said = []
    for words, limit in json.load(sys.stdin):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(["lora", *words])
        said.append((code, err.getvalue()))
    print(json.dumps(said))
"""


@pytest.fixture
def folder(tmp_path):
    for name, seed in (("style", 0), ("other", 1)):
        producers.make("ai-toolkit", "z-image", rank=4, seed=seed).write(tmp_path / f"{name}.safetensors")
    (tmp_path / "old.safetensors").write_bytes(b"old")
    return tmp_path


def output(words):
    return words[words.index("-o" if "-o" in words else "--plot") + 1]


def contents(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_a_full_disk_leaves_nothing_behind_wherever_the_write_ends(folder):
    size = (folder / "style.safetensors").stat().st_size
    tries = [(words, limit) for words in COMMANDS.values() for limit in (0, 100, size // 2)]
    before = contents(folder)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(CHILD)], input=json.dumps(tries), capture_output=True,
                          text=True, cwd=folder, timeout=120)
    assert done.returncode == 0, done.stderr
    for (words, limit), (code, said) in zip(tries, json.loads(done.stdout)):
        small_enough = "--plot" in words and limit == size // 2
        if not small_enough:
            assert code == 1 and len(said.splitlines()) == 1 and output(words) in said, (words, said)
            assert "too large" in said or "space" in said, said
    assert {name: sha for name, sha in contents(folder).items() if name not in ("out.txt", "out.html")} == before


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("call", ["open", "fsync", "chmod", "replace"])
def test_a_disk_that_is_full_at_any_step_of_publishing_leaves_nothing_behind(folder, monkeypatch, capsys, words, call):
    """Some file systems notice only then that they are full (NFS, quotas)."""
    monkeypatch.chdir(folder)
    before, seen = contents(folder), []

    class Full:
        """The module ``os`` with one function that fails."""

        def __getattr__(self, name):
            return fail if name == call else unsupported if name == "link" else getattr(os, name)

    def fail(*_, **__):
        seen.append(call)
        raise OSError(errno.ENOSPC, "No space left on device")

    def unsupported(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(publish, "os", Full())
    code = cli.main(["lora", *words])
    said = capsys.readouterr().err
    assert seen and code == 1 and len(said.splitlines()) == 1 and "No space left" in said, said
    assert contents(folder) == before
