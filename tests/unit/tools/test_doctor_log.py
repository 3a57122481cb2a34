"""``qpatch doctor --log``: known failures in any form of a log, the hook that mends each, how it stands, what to do."""

import io
import json
import re
import string
import subprocess
import sys

import failures
import pytest

from qpatch import catalogue, cli
from qpatch.doctor import log_findings, log_stream, log_text
from qpatch.doctor.log_advice import advise
from qpatch.doctor.verdict import ok, problem
from qpatch.hooks.signatures import SIGNATURES, SILENT

HERE, NOT_HERE = ok("the import hook is live"), problem("not active: no start-up file", "run: python -m qpatch enable")
BY_NAME = {signature.name: signature for signature in SIGNATURES}


def read(text):
    return log_findings.read(text, SIGNATURES)


def names(reading):
    return [finding.signature.name for finding in reading.findings]


def test_every_signature_has_a_log_and_every_hook_has_one_or_leaves_no_message():
    assert set(failures.LOGS) == set(BY_NAME) and len(BY_NAME) == len(SIGNATURES)
    hooks = {hook.name for hook in catalogue.HOOKS if not hook.internal}
    mended = {name for signature in SIGNATURES for name in signature.hooks}
    assert mended <= hooks and not mended & set(SILENT)
    assert hooks - mended - set(SILENT) == set()


@pytest.mark.parametrize("form", failures.FORMATS)
@pytest.mark.parametrize("name", failures.LOGS)
def test_each_failure_is_recognised_in_every_form_of_a_log(name, form):
    text = f"got prompt\n{failures.LOGS[name]}\nPrompt executed in 0.5 seconds"
    reading = read(failures.FORMATS[form](text))
    assert names(reading) == [name] and reading.findings[0].certain and reading.findings[0].count == 1
    assert not reading.unknown


@pytest.mark.parametrize("name", failures.LOGS)
def test_what_is_said_has_no_gaps_and_ends_in_something_to_do(name):
    (finding,) = read(failures.LOGS[name]).findings
    assert finding.happened.endswith(".") and not re.search(r"[{}]|  ", finding.happened)
    fields = [field for _, field, _, _ in string.Formatter().parse(finding.signature.happened) if field is not None]
    assert all(field.isdigit() for field in fields)
    assert advise(finding, read(failures.LOGS[name]), HERE).todo


@pytest.mark.parametrize("name", failures.STRANGERS)
def test_failures_of_others_are_not_taken_for_known_ones(name):
    text = failures.STRANGERS[name]
    reading = read(text)
    assert names(reading) == []
    assert [line.text for line in reading.unknown] == ([text.split("\n")[-1]] if text.startswith("Traceback") else [])


def test_a_message_without_its_traceback_is_a_guess_that_says_so():
    reading = read("!!! Exception during processing !!! 'NoneType' object has no attribute 'dtype'")
    assert names(reading) == ["lazy-linear"] and not reading.findings[0].certain


def test_a_message_and_its_traceback_in_one_log_are_one_certain_finding():
    message = "!!! Exception during processing !!! 'NoneType' object has no attribute 'dtype'"
    reading = read(f"{message}\n{failures.LOGS['zimage-fuse']}")
    assert names(reading) == ["zimage-fuse"] and reading.findings[0].certain


def test_an_error_report_that_names_the_message_before_the_stack_is_understood():
    report = """# ComfyUI Error Report
## Error Details
- **Node ID:** 3
- **Exception Type:** AttributeError
- **Exception Message:** 'NoneType' object has no attribute 'dtype'

## Stack Trace
```
  File "/opt/ComfyUI/execution.py", line 525, in execute
    output = run()

  File "/v/nunchaku/models/linear.py", line 152, in from_linear
    torch_dtype = kwargs.pop("torch_dtype", linear.weight.dtype)
```
"""
    reading = read(report)
    assert names(reading) == ["lazy-linear"] and reading.findings[0].certain and reading.findings[0].line.number == 5


@pytest.mark.parametrize("front", ["[2026-01-02 03:04:05.678] ", "[INFO] ", "2026-01-02 03:04:05,678 - root - INFO - ",
                                   "2026-01-02T03:04:05Z ", "Jan  2 03:04:05 host python[12]: ", "comfyui-1  | ", "> "])
def test_what_stands_in_front_of_a_message_is_taken_off_also_where_two_programs_have_put_it_there(front):
    for text in (front, front * 2, f"app | {front}> "):
        assert [line.text for line in log_text.lines([f"{text}got prompt"])] == ["got prompt"]


def test_a_failure_that_comes_again_is_counted():
    (finding,) = read("\n".join([failures.LOGS["lora-not-loaded"]] * 210)).findings
    assert finding.count == 210 and finding.line.number == 1


def test_a_progress_bar_does_not_hide_the_line_behind_it():
    assert names(read("\r 10%|#   | 1/10\r100%|####| 10/10\rlora key not loaded: x")) == ["lora-not-loaded"]


def test_line_numbers_are_those_of_the_file():
    found = list(log_text.lines(log_stream.split("a\r\nb\r\n" + failures.LOGS["lazy-linear"])))
    assert [line.number for line in found if line.frames] == [8] and found[7].text.startswith("AttributeError")


def test_every_hook_is_told_from_qpatch_s_own_lines():
    reading = read("[INFO] qpatch: lazy-linear applied to nunchaku.models.linear\n"
                   "qpatch: convrot incompatible for comfy.ops: comfy_kitchen 0.2.9 is older\n"
                   "qpatch: zimage-fuse failed on x.models.zimage and left it as it was: KeyError: 'y'\n")
    assert reading.active and {hook: state for hook, (state, _) in reading.states.items()} == {
        "lazy-linear": "applied", "convrot": "incompatible", "zimage-fuse": "failed"}


@pytest.mark.parametrize(("before", "activity", "environ", "mended", "todo"), [
    ("", HERE, {}, "run was without it", "start ComfyUI again"),
    ("", NOT_HERE, {}, "not active here (not active: no start-up file)", "qpatch enable"),
    ("", HERE, {"QPATCH_DISABLE": "lazy-linear"}, "off here: QPATCH_DISABLE names it",
     "take lazy-linear out of QPATCH_DISABLE"),
    ("qpatch: lazy-linear applied to nunchaku.models.linear", HERE, {}, "was applied in that run", "report it"),
    ("qpatch: lazy-linear incompatible for nunchaku.models.linear: from_linear is gone", HERE, {},
     "from_linear is gone", "update qpatch"),
    ("qpatch: lazy-linear failed on nunchaku.models.linear: KeyError", HERE, {}, "failed", "update qpatch"),
    ("qpatch: zimage-fuse applied to x", HERE, {}, "no line of its applying it", "qpatch status --import"),
])
def test_the_advice_fits_how_the_hook_stands(before, activity, environ, mended, todo, monkeypatch, no_switches):
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    reading = read(f"{before}\n{failures.LOGS['lazy-linear']}")
    advice = advise(reading.findings[0], reading, activity)
    assert advice.mended.startswith("lazy-linear mends this: ") and mended in advice.mended and todo in advice.todo


def test_a_failure_that_no_hook_mends_has_its_remedy():
    (finding,) = read(failures.LOGS["nunchaku-of-pypi"]).findings
    advice = advise(finding, read(""), HERE)
    assert advice.mended == "no hook of qpatch mends this" and "pip uninstall nunchaku" in advice.todo


@pytest.fixture
def no_switches(monkeypatch):
    for name in ("QPATCH", "QPATCH_DISABLE", "QPATCH_ENABLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_the_command_reads_a_file_in_any_encoding_of_windows(encoding, tmp_path, capsys):
    (tmp_path / "log.txt").write_text("日本\n" + failures.LOGS["rotary"], encoding=encoding)
    assert cli.main(["doctor", "--log", str(tmp_path / "log.txt")]) == 1
    shown = capsys.readouterr().out
    assert "comfy-compat-rotary" in shown and "line 5: ImportError" in shown and "-> " in shown


def test_the_command_reads_a_traceback_on_standard_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(failures.LOGS["zimage-lora"].encode())))
    assert cli.main(["doctor", "--log", "-"]) == 1
    assert "lora-loader mends this" in capsys.readouterr().out


def test_the_command_gives_json(tmp_path, capsys):
    (tmp_path / "log.txt").write_text(failures.LOGS["rotary"] + "\n" + failures.STRANGERS["another deepcopy"])
    cli.main(["doctor", "--json", "--log", str(tmp_path / "log.txt")])
    found = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["hooks"]) for row in found["found"]] == [("rotary", ["comfy-compat-rotary"])]
    assert [row["text"] for row in found["unknown"]] == ["TypeError: 'NoneType' object is not callable"]


@pytest.mark.parametrize(("text", "code", "said"), [
    ("Prompt executed in 3 seconds", 0, "No known failure and no traceback"),
    (failures.STRANGERS["another deepcopy"], 1, "1 error that qpatch knows nothing about"),
    ("\n".join([failures.STRANGERS["another assertion"]] * 5), 1, "5 errors that qpatch knows nothing about, the last 3"
     ),
    ("", 0, "No known failure"),
])
def test_the_command_is_honest_about_what_it_does_not_know(text, code, said, tmp_path, capsys):
    (tmp_path / "log.txt").write_text(text)
    assert cli.main(["doctor", "--log", str(tmp_path / "log.txt")]) == code
    assert said in capsys.readouterr().out


def test_a_log_that_is_not_there_is_a_wrong_command_line(tmp_path, capsys):
    assert cli.main(["doctor", "--log", str(tmp_path / "gone.txt")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_bytes_that_are_no_text_and_large_logs_are_read(tmp_path, capsys):
    known = failures.LOGS["flux-wrapper"].encode()
    (tmp_path / "log.txt").write_bytes(b"\xff\x00\xfe" * 1000 + b"\n" + known + b"\nx" * 200000)
    assert cli.main(["doctor", "--log", str(tmp_path / "log.txt")]) == 1
    assert "comfy-compat-flux-wrapper" in capsys.readouterr().out


def test_reading_a_log_imports_neither_torch_nor_upstream(tmp_path):
    (tmp_path / "log.txt").write_text(failures.LOGS["lazy-linear"])
    code = ("import sys; from qpatch.cli import main; main(sys.argv[1:]);"
            "print({'torch', 'numpy', 'comfy'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code, "doctor", "--log", str(tmp_path / "log.txt")],
                          capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


def test_of_errors_that_nothing_is_known_about_the_last_are_kept_and_all_are_counted():
    text = failures.STRANGERS["another multiplication"]
    reading = read("\n".join([text] * 250))
    assert reading.unknowns == 250 and len(reading.unknown) == log_findings.KEPT
    assert reading.unknown[-1].number == 250 * len(text.split("\n"))


def test_escape_sequences_of_a_log_do_not_reach_the_terminal(tmp_path, capsys):
    log = tmp_path / "log"
    log.write_text(failures.traceback("ValueError: \x1b]0;owned\x07 \x1b[2J bad", failures.EXECUTE))
    assert cli.main(["doctor", "--log", str(log)]) == 1
    assert not {"\x1b", "\x07"} & set(capsys.readouterr().out)
