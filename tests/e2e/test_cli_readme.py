"""The README's commands are the ones that CI runs, and each of them exists."""

import re
import shlex
from pathlib import Path

import pytest

from qpatch import catalogue, cli, toggles

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def only(pattern: str, lines) -> str:
    (found,) = [match.group(1) for line in lines if (match := re.search(pattern, line))]
    return found


def test_the_first_screen_has_one_command_that_does_the_job_and_one_that_passes_the_tests():
    assert README.index("```sh") < 1500
    assert [command.rpartition("&& ")[2] for command in COMMANDS] == [".venv/bin/qpatch selftest", ".venv/bin/pytest"]


def test_ci_installs_and_runs_what_the_readme_says():
    test_command = COMMANDS[1]
    assert only(r"pip install .*?(\"\.\[\w+\]\")", CI) == only(r"pip install .*?(\"\.\[\w+\]\")", [test_command])
    assert test_command.rpartition(".venv/bin/")[2] == next(line for line in reversed(CI) if line.strip())


@pytest.mark.parametrize("command", COMMANDS)
def test_the_torch_of_the_readme_is_the_one_that_ci_tests(command):
    pinned = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").split()
    assert re.search(r"torch==\S+", command).group() in pinned


VERB = r"(?:status|doctor|selftest|enable|disable|lora|run)"
SPELT = sorted(set(re.findall(rf"(?<![-.\w])qpatch ({VERB}\b[^`&\n]*)", README)))


@pytest.mark.parametrize("command", SPELT)
def test_every_qpatch_command_in_the_readme_is_one_that_qpatch_understands(command):
    words = shlex.split(command.strip())
    arguments = cli.parser(words).parse_args(words)
    assert arguments.verb == words[0]


def test_every_verb_is_in_the_readme():
    assert {command.split()[0] for command in SPELT} == set(cli.VERBS)


def test_the_readme_promises_no_hook_that_is_not_there():
    table = README[README.index("## Hooks"):README.index("## Switch it off")]
    listed = re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)
    assert listed and set(listed) <= {hook.name for hook in catalogue.HOOKS if not hook.internal}


@pytest.mark.parametrize("variable", sorted(set(re.findall(r"\bQPATCH(?:_[A-Z]+)?(?==)", README))))
def test_every_variable_in_the_readme_is_one_that_qpatch_reads(variable, monkeypatch):
    monkeypatch.setenv(variable, "")
    assert not [said for said in toggles.complaints() if said.startswith(variable)]


def test_the_start_up_line_in_the_readme_is_the_one_that_runs():
    assert (ROOT / "qpatch.pth").read_text(encoding="ascii").strip() in README


def test_every_hook_but_the_small_repairs_and_every_variable_is_in_the_readme():
    hooks = [hook for hook in catalogue.HOOKS if not hook.internal and not hook.name.startswith("comfy-compat-")]
    assert [hook.name for hook in hooks if f"| `{hook.name}` |" not in README] == []
    assert [name for hook in hooks for name in hook.variables if f"| `{name}=" not in README] == []
