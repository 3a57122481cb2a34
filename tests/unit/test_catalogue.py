"""The catalogue is data; these are the rules that the data must keep."""

import importlib
import subprocess
import sys

from qpatch import catalogue, finder

TARGETS = [(hook, target) for hook in catalogue.HOOKS for target in hook.targets]
UPSTREAM = ("comfy", "comfy_kitchen", "comfy_extras", "nunchaku", "comfyui_nunchaku", "nodes", "folder_paths",
            "execution")


def test_the_finder_watches_exactly_the_catalogue_s_targets():
    assert catalogue.patterns() == finder.TARGETS


def test_the_names_of_hooks_are_unique():
    names = [hook.name for hook in catalogue.HOOKS]
    assert len(names) == len(set(names))


def test_a_tail_has_a_fingerprint_and_only_tails_have_a_star():
    for hook, target in TARGETS:
        assert "*" not in target.pattern[1:] and (target.exact or target.pattern.startswith("*.")), target.pattern
        assert target.exact or target.defines, f"{hook.name}: any module that ends in {target.pattern[1:]} would do"


def test_each_implementation_has_the_two_functions_of_a_hook():
    for hook, target in TARGETS:
        implementation = importlib.import_module(target.implementation)
        for function in ("examine", "patches"):
            assert callable(getattr(implementation, function, None)), f"{hook.name}: {target.implementation}.{function}"


def test_no_hook_imports_a_target_when_it_is_itself_imported(tmp_path):
    """A hook is imported while its target's import lock is held; importing another target then can wait for ever."""
    code = (f"import importlib, sys\nfor name in {sorted({target.implementation for _, target in TARGETS})!r}:\n"
            f"    importlib.import_module(name)\n"
            f"print(*[name for name in sys.modules if name.partition('.')[0] in {UPSTREAM!r}])")
    # Not from the repository: its folder qpatch has no hooks in it.
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr
