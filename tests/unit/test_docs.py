"""The documentation does what it says: commands run, examples work, messages are recognised, links lead somewhere.

Blocks marked ``sh run`` are run here. Commands inside of sentences and tables are parsed: many of them need a ComfyUI
folder or change the interpreter's start-up files. Blocks marked ``sh`` alone are not qpatch's commands, and are listed
below.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import failures
import producers
import pytest

from qpatch import catalogue, cli, toggles
from qpatch.doctor.log_findings import read
from qpatch.hooks.signatures import SIGNATURES

ROOT = Path(__file__).resolve().parents[2]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
         for path in [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]}
FENCE = re.compile(r"^```(\S*) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(page, *match) for page, text in PAGES.items() for match in FENCE.findall(text)]
PROSE = {page: FENCE.sub("", text) for page, text in PAGES.items()}
HOOKS = [hook for hook in catalogue.HOOKS if not hook.internal]

#: Shell commands that other tests run (README), or that start ComfyUI.
NOT_RUN = ("python3 -m venv ", "QPATCH_LOG=debug python main.py")


def commands(kind):
    return [(page, line) for page, language, mark, body in BLOCKS if language == "sh" and mark == kind
            for line in body.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the commands name."""
    home = tmp_path_factory.mktemp("docs")
    for name, seed in (("style", 1), ("other", 2)):
        producers.make("ai-toolkit", "z-image", rank=4, blocks=2, seed=seed).write(home / f"{name}.safetensors")
    (home / "comfyui.log").write_text(failures.LOGS["lazy-linear"])
    return home


@pytest.mark.parametrize(("page", "line"), commands("run"))
def test_every_command_of_a_run_block_runs(page, line, folder, monkeypatch, capsys):
    if ".png" in line:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(folder)
    program, *words = shlex.split(line)
    assert program == "qpatch"
    # The doctor's verdict is about this machine; the log that it is given has a failure in it.
    assert cli.main(words) in ((0, 1) if words[0] == "doctor" else (0,)), capsys.readouterr().err
    if "-o" in words:
        assert (folder / words[words.index("-o") + 1]).is_file()


def test_no_other_shell_block_holds_a_command_of_ours():
    assert [line for _, line in commands("") if not line.startswith(NOT_RUN)] == []


INLINE = sorted({(page, span.replace("\n", " ")) for page, text in PROSE.items()
                 for span in re.findall(rf"(?<!`)`(?:python -m )?(qpatch (?:{'|'.join(cli.VERBS)})\b[^`]*)`", text)})


@pytest.mark.parametrize(("page", "command"), INLINE)
def test_every_command_in_a_sentence_is_one_that_qpatch_understands(page, command):
    words = shlex.split(command)[1:]
    if words == ["lora"] or words[:1] == ["lora"] and len(words) == 2:
        # The name of a sub-verb, not a command.
        from qpatch.cli import lora

        assert words[1:] == [] or words[1] in lora.VERBS
        return
    words = [word.replace("...", "x") for word in words]
    assert cli.parser(words).parse_args(words).verb == words[0]


#: What stands for a file or a folder in them -> what it is here.
STAND_INS = {"FILE": "style.safetensors", "A": "style.safetensors", "B": "other.safetensors",
             "PATH": str(ROOT / "tests" / "standins" / "ComfyUI")}
#: Commands that change the interpreter, start other ones or wait for input -> the tests that run them.
RUN_ELSEWHERE = {
    "enable": "unit/cli/test_enable.py", "disable": "unit/cli/test_enable.py", "run": "e2e/test_cli_run.py",
    "selftest": "e2e/test_cli_readme.py", "doctor --log -": "e2e/test_lora_cli.py",
}
RUN_HERE = sorted({command for _, command in INLINE
                   if not command.removeprefix("qpatch ").startswith(tuple(RUN_ELSEWHERE)) and len(command.split()) > 1
                   and (command.split()[1] != "lora" or len(command.split()) > 3)})


@pytest.mark.parametrize("command", RUN_HERE)
def test_every_command_in_a_sentence_runs_with_files_for_its_placeholders(command, folder, monkeypatch, tmp_path,
                                                                          capsys):
    monkeypatch.chdir(folder)
    words = [re.sub(r"^[A-Z]+(?=:|$)", lambda found: STAND_INS[found.group()], word)
             for word in shlex.split(command)[1:]]
    words = [str(tmp_path / word) if word.startswith("OUT.") else word for word in words]
    if "--log" in words:
        words[-1] = "comfyui.log"
    if "--import" in words:
        # It imports its targets, which would stay here.
        assert subprocess.run([sys.executable, "-m", "qpatch", *words], capture_output=True).returncode in (0, 1)
        return
    # Verdicts are about this machine.
    assert cli.main(words) in ((0,) if words[0] == "lora" else (0, 1)), capsys.readouterr().err


@pytest.mark.parametrize(("words", "place"), RUN_ELSEWHERE.items())
def test_the_other_commands_are_run_by_the_tests_that_are_named(words, place):
    text = (ROOT / "tests" / place).read_text(encoding="utf-8")
    assert all(f'"{word}"' in text or f" {word}" in text for word in words.split())


SCRIPTS = sorted({(page, command) for page, text in PAGES.items()
                  for command in re.findall(r"python (tests/[^`\n]+)", text)})


@pytest.mark.parametrize(("page", "command"), SCRIPTS)
def test_scripts_that_pages_name_exist_and_know_the_options(page, command):
    script, *words = shlex.split(command)
    if script.endswith("benchmarks/run.py") and words:
        script = f"tests/benchmarks/{words[0]}.py"
    text = (ROOT / script).read_text(encoding="utf-8")
    assert all(word in text for word in words if word.startswith("--"))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_pages_and_headings_that_exist(page):
    here = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", PROSE[page]):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (here / name).resolve() if name else ROOT / page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


def test_every_page_can_be_reached_from_the_index():
    found, todo = set(), ["docs/index.md"]
    while todo:
        page = todo.pop()
        found.add(page)
        for target in re.findall(r"\]\(([^)#\s]+\.md)[^)]*\)", PROSE[page]):
            path = os.path.relpath(((ROOT / page).parent / target).resolve(), ROOT)
            if path in PAGES and path not in found:
                todo.append(path)
    assert set(PAGES) - found == set()


def test_every_hook_has_its_story_and_its_toggle():
    index, switches, stories = PAGES["docs/index.md"], PAGES["docs/toggles.md"], PAGES["docs/hooks/compat.md"]
    for hook in HOOKS:
        if hook.name.startswith("comfy-compat-"):
            assert f"\n## {hook.name}\n" in stories, hook.name
        else:
            assert f"`{hook.name}`" in index and f"| `{hook.name}` |" in switches, hook.name
    told = set(re.findall(r"^## (comfy-compat-\S+)$", stories, re.MULTILINE))
    assert told == {hook.name for hook in HOOKS if hook.name.startswith("comfy-compat-")}


def test_every_variable_is_described_and_none_that_does_not_exist(monkeypatch):
    variables = {"QPATCH", "QPATCH_DISABLE", "QPATCH_ENABLE", "QPATCH_LOG", "QPATCH_STRICT"}
    variables |= {name for hook in HOOKS for name in hook.variables}
    assert set(re.findall(r"^\| `(QPATCH\w*)` \|", PAGES["docs/toggles.md"], re.MULTILINE)) == variables
    for name in sorted({name for text in PAGES.values() for name in re.findall(r"\b(QPATCH(?:_[A-Z]+)*)(?==)", text)}):
        monkeypatch.setenv(name, "")
        assert not [said for said in toggles.complaints() if said.startswith(name)], name


MESSAGES = [(message, said) for message, said in
            re.findall(r"^- `([^`\n]+)` \\\n((?:  .*\n)+)", PAGES["docs/troubleshooting.md"], re.MULTILINE)
            if not message.startswith("qpatch: ")]
SAMPLES = {text.split("\n")[-1]: text for text in failures.LOGS.values()}


@pytest.mark.parametrize(("message", "said"), MESSAGES)
def test_each_message_of_the_troubleshooting_page_is_recognised_and_the_hook_is_the_one_named(message, said):
    (finding, *_) = read(SAMPLES.get(message, message), SIGNATURES).findings
    named = re.findall(r"[Mm]ended by\s+\[([^\]]+)\]", said) + re.findall(r"that is mended by\s+\[([^\]]+)\]", said)
    hooks = {name for words in named for name in re.findall(r"`([\w-]+)`", words)}
    if hooks:
        assert hooks & set(finding.signature.hooks)
    else:
        assert "Not mended" in said or not finding.signature.hooks or "qpatch" in said


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.name)
def test_the_message_of_every_known_failure_can_be_found_on_the_troubleshooting_page(signature):
    spans = re.findall(r"``(.+?)``|`([^`\n]+)`", PAGES["docs/troubleshooting.md"])
    assert any(re.search(signature.message, one or other) for one, other in spans)


EXAMPLES = sorted({page for page, language, mark, _ in BLOCKS if language == "python" and mark == "run"})


@pytest.mark.parametrize("page", EXAMPLES)
def test_the_worked_example_of_a_page_works(page, tmp_path):
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "qpatch", source / "qpatch", ignore=ignore)
    for name in ("hooks", "lora"):
        shutil.copytree(ROOT / name, source / "qpatch" / name, ignore=ignore)
    blocks = [(mark, body) for where, language, mark, body in BLOCKS if where == page and language == "python"]
    for mark, body in blocks:
        if mark != "run":
            follow(source, mark, body)
    for mark, body in blocks:
        if mark == "run":
            environment = {name: value for name, value in os.environ.items() if not name.startswith("QPATCH")}
            done = subprocess.run([sys.executable, "-c", body], env={**environment, "PYTHONPATH": str(source)},
                                  capture_output=True, text=True, cwd=tmp_path)
            assert done.returncode == 0, done.stderr


def follow(source: Path, mark: str, body: str) -> None:
    """Do what a block says: write a file, insert before a line, or replace a piece of one."""
    what, _, rest = mark.partition("=")
    name, _, where = rest.partition(" ")
    path = source / (name if name.startswith("qpatch/") else f"qpatch/{name}")
    if what == "file":
        assert not path.exists()
        path.write_text(body)
        return
    old = where.partition("=")[2].replace("\\n", "\n")
    text = path.read_text()
    assert text.count(old) == 1, f"{name}: {old!r} is there {text.count(old)} times"
    path.write_text(text.replace(old, body + old if what == "insert" else body.rstrip("\n")))
