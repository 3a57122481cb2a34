"""docs/architecture.md: imports point the way it says, and it names what there is."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
TOPS = {"qpatch": "qpatch", "hooks": "qpatch.hooks", "lora": "qpatch.lora"}
START_UP = ("qpatch", "qpatch.finder")
COMMANDS = ("qpatch.cli", "qpatch.doctor", "qpatch.selftest", "qpatch.__main__")


def modules():
    """Installed name -> source."""
    for top, name in TOPS.items():
        for path in sorted((ROOT / top).rglob("*.py")):
            inner = path.relative_to(ROOT / top).with_suffix("").parts
            yield ".".join([name, *inner]).removesuffix(".__init__"), path


MODULES = dict(modules())


def imports(name):
    """Absolute names that a module imports, wherever in it."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[:len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                yield f"{source}.{alias.name}" if f"{source}.{alias.name}" in MODULES else source


def below(name, packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


def wrong(names, forbidden):
    return {(name, used) for name in names for used in imports(name) if below(used, forbidden)}


HOOKS = [name for name in MODULES if below(name, ["qpatch.hooks"])]
LORA = [name for name in MODULES if below(name, ["qpatch.lora"])]
ENGINE = [name for name in MODULES if not below(name, ["qpatch.hooks", "qpatch.lora", *COMMANDS])]


def test_lora_knows_neither_comfyui_nor_nunchaku_nor_the_engine_nor_the_hooks():
    foreign = ["comfy", "comfy_kitchen", "nunchaku", "nodes", "folder_paths", "qpatch.hooks", *ENGINE[1:], *COMMANDS]
    # Each asks whether it has been imported by somebody, or is for a caller that hands such things over.
    allowed = {("qpatch.lora.progress", "comfy.utils"), ("qpatch.lora.modules.kitchen", "comfy_kitchen.tensor")}
    assert wrong(LORA, foreign) - allowed == set()


def test_the_engine_knows_hooks_by_name_only_and_nothing_of_lora():
    assert len(ENGINE) > 10 and wrong(ENGINE, ["qpatch.hooks", "qpatch.lora"]) == set()


def test_hooks_know_nothing_of_the_commands():
    # The versions that a repair was seen in are compared as the doctor compares them.
    assert wrong(HOOKS, COMMANDS) == {("qpatch.hooks.compat.known", "qpatch.doctor.packages")}


def test_start_up_knows_nobody():
    later = [name for name in MODULES if name not in START_UP]
    inside = {("qpatch.finder", "qpatch.shadow"), ("qpatch.finder", "qpatch.engine")}
    assert wrong(START_UP, later) == inside


@pytest.mark.parametrize("name", MODULES)
def test_the_first_line_of_a_module_says_what_it_is_for(name):
    text = ast.get_docstring(ast.parse(MODULES[name].read_text("utf-8"))) or ""
    assert len(text.partition("\n")[0]) > 15


@pytest.mark.parametrize("top", TOPS)
def test_the_page_names_each_module_and_none_that_is_not_there(top):
    section = re.search(rf"^## [^\n]*`{top}/`\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)[1]
    column = 2 if top == "lora" else 1
    named = {word for row in section.splitlines() if row.startswith("| ")
             for word in re.findall(r"`(\w+)`", row.split("|")[column])}
    there = {path.stem if path.is_file() else path.name for path in (ROOT / top).iterdir()
             if path.suffix == ".py" or path.is_dir() and (path / "__init__.py").is_file()}
    commands = {name.partition(".")[2] for name in COMMANDS}
    assert named == there - (commands if top == "qpatch" else {"__init__"})
