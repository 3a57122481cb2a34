"""What every verb has in common: errors of one line, exit codes, help."""

import json
import os
import subprocess
import sys

import pytest

from qpatch import cli
from qpatch.cli import errors, text
from qpatch.doctor import verdict


def run(*words, **options):
    return subprocess.run([sys.executable, "-m", "qpatch", *words], capture_output=True, text=True, **options)


@pytest.mark.parametrize("words", [
    [], ["stauts"], ["status", "--jsn"], ["doctor", "--comfyui"], ["doctor", "--comfyui", "/no/such/folder"],
    ["status", "--comfyui", "/no/such/folder"], ["run"], ["run", "/no/such/script.py"], ["enable", "somewhere"],
])
def test_a_wrong_command_line_gets_one_line_and_exit_code_2(words):
    done = run(*words)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "error:" in done.stderr


@pytest.mark.parametrize("verb", [None, *cli.VERBS])
def test_every_help_documents_the_exit_codes(verb, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([verb, "--help"] if verb else ["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "exit codes:" in shown and all(f"\n  {code}  " in shown for code in (0, 1, 2, 3))


def test_the_version_is_that_of_the_package(capsys):
    import qpatch

    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"qpatch {qpatch.__version__}\n"


@pytest.fixture
def verb(monkeypatch):
    """A verb that does what a test says."""
    from qpatch.cli import enable

    def behave(action):
        monkeypatch.setattr(enable, "run", lambda arguments: action())
        return enable

    return behave


def raiser(error):
    def action():
        raise error

    return action


@pytest.mark.parametrize(("error", "code", "said"), [
    (errors.CliError("cannot do it"), 1, "qpatch: error: cannot do it\n"),
    (errors.CliError("not like this", code=2), 2, "qpatch: error: not like this\n"),
    (ValueError("of\ntwo lines"), 3, "qpatch: error: qpatch failed: ValueError: of two lines\n"),
])
def test_an_error_is_one_line_and_debug_adds_the_traceback(verb, capsys, error, code, said):
    verb(raiser(error))
    assert cli.main(["enable"]) == code
    assert capsys.readouterr().err == said
    for words in (["--debug", "enable"], ["enable", "--debug"]):
        assert cli.main(words) == code
        shown = capsys.readouterr().err
        assert "Traceback" in shown and shown.endswith(said)


def test_an_interrupt_ends_quietly_with_the_code_of_one(verb, capsys):
    verb(raiser(KeyboardInterrupt()))
    assert cli.main(["enable"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(os.name == "nt", reason="the shell pipe is POSIX")
def test_a_reader_that_goes_away_is_no_error():
    done = subprocess.run(f'"{sys.executable}" -m qpatch doctor | head -n 1 >/dev/null; echo "${{PIPESTATUS[0]}}"',
                          shell=True, executable="/bin/bash", capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.strip() in ("0", "1")


def test_a_console_that_lacks_a_character_shows_an_escape(tmp_path):
    folder = tmp_path / "日本"
    folder.mkdir()
    done = run("doctor", "--comfyui", str(folder), env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.returncode in (0, 1) and "\\u65e5\\u672c" in done.stdout


@pytest.mark.parametrize("verb", ["status", "doctor"])
def test_reports_import_neither_torch_nor_the_other_verbs(verb):
    heavy = {"torch", "numpy", "safetensors", "comfy", "nunchaku", "qpatch.cli.enable"}
    code = f"import sys; from qpatch.cli import main; main(sys.argv[1:]); print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code, verb, "--json"], capture_output=True, text=True)
    assert done.stdout.rpartition("}\n")[2] == "[]\n"


@pytest.mark.parametrize("verb", ["status", "doctor"])
@pytest.mark.parametrize("columns", [40, 80, 90, 300])
def test_reports_fit_the_terminal_within_60_and_100_columns(verb, columns, machine, monkeypatch, capsys):
    machine.program()
    machine.pack()
    monkeypatch.setenv("COLUMNS", str(columns))
    cli.main([verb, "--comfyui", str(machine.comfyui)])
    lines = capsys.readouterr().out.splitlines()
    limit = max(60, min(100, columns))
    # A path is never broken: somebody wants to copy it.
    assert [line for line in lines if len(line) > limit and os.sep not in line] == []
    # And the room is used: the next word would not have fitted.
    assert verb == "status" or any(len(line) > limit - 12 for line in lines if os.sep not in line)


@pytest.mark.parametrize(("kind", "code", "summary"), [
    ("ok", 0, "nothing wrong was found"), ("note", 0, "1 note"), ("warn", 0, "1 warning"), ("problem", 1, "1 problem"),
    ("skipped", 0, "nothing wrong was found"),
])
def test_the_doctors_exit_code_is_1_only_where_something_does_not_work(monkeypatch, capsys, kind, code, summary):
    said = verdict.Verdict(kind, "a finding", "a remedy")
    monkeypatch.setattr("qpatch.doctor.examine", lambda context: {"check": said, "other": verdict.ok("fine")})
    assert cli.main(["doctor"]) == code
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == summary and "a finding" in shown
    assert cli.main(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == ("ok" if kind == "skipped" else kind)
    assert report["checks"][0] == {"name": "check", "verdict": kind, "found": "a finding", "todo": "a remedy"}


def test_json_reports_are_json_and_nothing_else(capsys):
    for verb in ("status", "doctor"):
        cli.main([verb, "--json"])
        assert json.loads(capsys.readouterr().out)["python"] == sys.executable


def test_text_is_wrapped_under_its_own_column(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert text.row(("ok", "name"), (5, 7), "word " * 12).splitlines()[1].startswith(" " * 12 + "word")
    assert [text.count(number, "hook") for number in (0, 1, 2)] == ["0 hooks", "1 hook", "2 hooks"]


@pytest.mark.skipif(os.name != "posix", reason="the shell of POSIX closes the stream")
def test_closed_output_streams_are_no_failure_of_qpatch():
    # Python has None for sys.stdout then, as it has in a program without a console.
    done = subprocess.run(f'"{sys.executable}" -m qpatch status >&-', shell=True, capture_output=True, text=True)
    assert done.returncode in (0, 1) and done.stderr == ""
