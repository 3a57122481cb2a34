"""The catalogue is data; these are the rules that the data must keep."""

import ast
import importlib
import importlib.util
from pathlib import Path

from qpatch import catalogue, finder

TARGETS = [(hook, target) for hook in catalogue.HOOKS for target in hook.targets]
UPSTREAM = ("comfy", "comfy_kitchen", "comfy_extras", "nunchaku", "comfyui_nunchaku", "nodes", "folder_paths", "execution")


def test_the_finder_watches_exactly_the_catalogue_s_targets():
    assert finder.TARGETS == catalogue.patterns()


def test_the_names_of_hooks_are_unique():
    names = [hook.name for hook in catalogue.HOOKS]
    assert len(names) == len(set(names))


def test_a_tail_has_a_fingerprint_and_only_tails_have_a_star():
    for hook, target in TARGETS:
        assert "*" not in target.pattern[1:] and (target.exact or target.pattern.startswith("*.")), target.pattern
        assert target.exact or target.defines, f"{hook.name}: any module that ends in {target.pattern[1:]} would be taken"


def test_each_implementation_has_the_two_functions_of_a_hook():
    for hook, target in TARGETS:
        implementation = importlib.import_module(target.implementation)
        for function in ("examine", "patches"):
            assert callable(getattr(implementation, function, None)), f"{hook.name}: {target.implementation}.{function}"


def test_no_module_of_ours_imports_a_target_when_it_is_itself_imported():
    """A hook is imported while its target's import lock is held; importing another target then can wait for ever."""
    package = Path(importlib.util.find_spec("qpatch").origin).parent
    for path in package.rglob("*.py"):
        for name in _imported_at_the_top(ast.parse(path.read_text("utf-8")).body):
            assert name.partition(".")[0] not in UPSTREAM, f"{path.relative_to(package)} imports {name}"


def _imported_at_the_top(body):
    # A lambda or a conditional expression has a body too, which is no list of statements.
    for node in body if isinstance(body, list) else []:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for part in ("body", "orelse", "handlers", "finalbody"):
                yield from _imported_at_the_top(getattr(node, part, None) or [])
