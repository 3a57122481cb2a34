"""docs/security.md: its audit runs as it stands there; audit events of the commands show no connection and no write."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import producers
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text("utf-8")

LISTENER = """
import sys
seen = []

def listen(event, arguments):
    if event.startswith(("socket.", "urllib.", "subprocess.", "os.system", "os.posix_spawn", "os.fork", "pickle.",
                         "os.rename", "os.remove", "os.mkdir", "tempfile.")):
        seen.append((event, repr(arguments)))
    elif event == "open" and arguments[2] & 0o3:
        seen.append((event, repr(arguments[0])))

sys.addaudithook(listen)
"""


def block(kind):
    (text,) = re.findall(rf"^```sh {kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return text.splitlines()


def shell(env, line, cwd):
    path = os.pathsep.join([str(env.python.parent), os.environ["PATH"]])
    done = subprocess.run(["sh", "-c", line], env={**os.environ, "PATH": path}, cwd=cwd, capture_output=True, text=True)
    assert done.stderr == "", done.stderr
    return done.stdout


@pytest.mark.skipif(os.name == "nt", reason="the page's commands are those of a shell")
def test_the_audit_of_the_page_prints_what_its_comments_say(installed_with_torch, tmp_path):
    start_up, modules, code, altered, reaching, status = (
        shell(installed_with_torch, line, tmp_path) for line in block("audit") if not line.startswith("#"))
    assert start_up == "import qpatch; qpatch.activate()\n"
    assert re.findall(r"\| +(qpatch\S*)$", modules, re.MULTILINE) == ["qpatch", "qpatch.finder"]
    assert "def activate" in code and "class Finder" in code and len(code.splitlines()) < 160
    assert altered == "[]\n"
    assert reaching == ""
    assert "lazy-linear" in status


@pytest.mark.skipif(os.name == "nt", reason="the page's commands are those of a shell")
def test_the_audit_finds_a_file_that_was_altered_and_code_that_reaches_for_the_network(fresh, tmp_path):
    (fresh.site / "qpatch" / "log.py").write_text("import socket\n")
    lines = [line for line in block("audit") if not line.startswith("#")]
    assert shell(fresh, lines[3], tmp_path) == "['qpatch/log.py']\n"
    assert "import socket" in shell(fresh, lines[4], tmp_path)


def test_the_build_of_the_page_is_the_same_wheel_twice(copy_of_the_source, tmp_path):
    (line,) = block("build")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if shutil.which("sha256sum") is None:
        pytest.skip("this system has no sha256sum")
    sums = []
    for name in ("one", "two"):
        source = copy_of_the_source(tmp_path / name)
        done = subprocess.run(["sh", "-c", line.replace("--wheel", "--wheel --no-isolation")], cwd=source,
                              env={**os.environ, "PATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        sums.append(done.stdout.splitlines()[-1])
    assert sums[0] == sums[1] and sums[0].endswith("-py3-none-any.whl")


@pytest.mark.parametrize("command, written", [
    (["status"], set()),
    (["doctor", "--json"], set()),
    (["lora", "inspect", "style.safetensors", "--json"], set()),
    (["lora", "diff", "style.safetensors:0.5", "style.safetensors"], set()),
    (["lora", "convert", "style.safetensors", "-o", "out.safetensors", "--to", "kohya"], {"out.safetensors"}),
])
def test_commands_write_what_was_named_and_open_no_connection(installed_with_torch, tmp_path, command, written):
    producers.make("ai-toolkit", "z-image", rank=4, blocks=1, seed=1).write(tmp_path / "style.safetensors")
    (tmp_path / "listener.py").write_text(LISTENER)
    told = installed_with_torch.run(
        f"import sys; sys.dont_write_bytecode = True; sys.path.insert(0, {str(tmp_path)!r})\n"
        # torch's own start is not ours to answer for.
        "import torch, listener\nfrom qpatch import cli\n"
        f"code = cli.main({command!r})\nprint(); print(listener.seen)", cwd=tmp_path)
    seen = ast.literal_eval(told.stdout.splitlines()[-1])
    changed = [what for event, what in seen if event == "open" or event.startswith(("os.re", "os.mkdir", "tempfile."))]
    # No process, connection or pickle, and what was touched is the named file and the hidden folder where it is made.
    assert [event for event, _ in seen if not event.startswith(("open", "os.re", "os.mkdir", "tempfile."))] == []
    # shutil.rmtree removes what is in that folder by the folder's descriptor.
    ours = (f"{tmp_path}{os.sep}out.safetensors", f"{tmp_path}{os.sep}.qpatch-", "unfinished'")
    assert all(what.lstrip("('").startswith(ours) for what in changed), changed
    assert bool(changed) == bool(written)
    assert {path.name for path in tmp_path.iterdir()} == {"style.safetensors", "listener.py", *written}
