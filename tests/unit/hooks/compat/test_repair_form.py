"""The form of a repair: what ``examine`` answers for targets of every shape."""

import re
import sys
import textwrap
from types import ModuleType

import pytest

import qpatch.hooks.compat as compat
from qpatch.hooks.compat import Repair, Spot, accepts
from qpatch.patching import put


def _module(source=""):
    module = ModuleType("target")
    exec(textwrap.dedent(source), module.__dict__)
    return module


def _worked_example():
    source = re.search(r"A whole one::\n\n(.*?)\n\n``examine``", compat.__doc__, re.S).group(1)
    return ModuleType("example"), textwrap.dedent(source).replace("from . import", "from qpatch.hooks.compat import")


def test_the_worked_example_of_the_docstring_is_under_30_lines_and_mends_its_target():
    example, source = _worked_example()
    assert source.count("\n") < 30
    exec(source, example.__dict__)
    broken = _module("class Runner:\n    def run(self, way):\n        return way")
    assert example.examine(broken).verdict == "needed"
    put(example.patches(broken))
    assert broken.Runner().run("down", speed=3) == "down"


def test_the_worked_example_leaves_a_mended_target_alone():
    example, source = _worked_example()
    exec(source, example.__dict__)
    found = example.examine(_module("class Runner:\n    def run(self, way, speed=None):\n        return way"))
    assert (found.verdict, found.reason) == ("not-needed", "it knows speed=")


def _broken(original, module):
    return "broken"


def _same(original, module):
    return original


def _stops(original, module):
    raise LookupError("no such thing")


@pytest.mark.parametrize("source, path, says", [
    ("", "f", "there is no f"),
    ("", "C.f", "there is no C.f"),
    ("C = 3", "C.f", "there is no C.f"),
    ("class C: pass", "C.f", "there is no C.f"),
    ("f = len", "f", "f is a builtin_function_or_method"),
    ("f = 5", "f", "f is a int"),
    ("class C:\n    f = len", "C.f", "C.f is a builtin_function_or_method"),
    ("class C(dict): pass", "C.update", "C.update is a method_descriptor"),
])
def test_a_function_that_is_gone_or_not_written_in_python_is_incompatible_and_named(source, path, says):
    found = Repair(Spot(path, _broken, _same), fine="").examine(_module(source))
    assert found.verdict == "incompatible"
    assert says in found.reason


def test_a_probe_that_stops_is_incompatible_and_says_how():
    found = Repair(Spot("f", _stops, None), fine="").examine(_module("def f(): pass"))
    assert found.verdict == "incompatible"
    assert "LookupError: no such thing" in found.reason


def test_a_mend_that_cannot_be_made_is_incompatible_before_anything_is_changed():
    found = Repair(Spot("f", _broken, _stops), fine="").examine(_module("def f(): pass"))
    assert found.verdict == "incompatible" and "LookupError" in found.reason


def test_one_spot_that_is_not_understood_outweighs_one_that_is_broken():
    repair = Repair(Spot("f", _broken, _same), Spot("g", _broken, _same), fine="")
    assert repair.examine(_module("def f(): pass")).verdict == "incompatible"


def test_only_the_broken_spots_are_patched():
    repair = Repair(Spot("f", _broken, lambda original, module: lambda: "mended"),
                    Spot("g", lambda original, module: None, None), fine="")
    module = _module("def f(): return 1\ndef g(): return 2")
    put(repair.patches(module))
    assert (module.f(), module.g()) == ("mended", 2)


def test_a_lazy_module_s_names_are_not_woken_by_looking():
    class Lazy(ModuleType):
        def __getattr__(self, name):
            raise AssertionError(f"{name} was asked for")

    assert Repair(Spot("f", _broken, _same), fine="").examine(Lazy("target")).verdict == "incompatible"


@pytest.mark.parametrize("source, answer", [
    ("def f(a, b): pass", True),
    ("def f(a): pass", False),
    ("def f(a, **rest): pass", True),
    ("def f(a, b, /): pass", False),
    ("def inner(a): pass\ndef f(*args, **kwargs): pass\nf.__wrapped__ = inner", False),
    ("def inner(a, b): pass\ndef f(*args, **kwargs): pass\nf.__wrapped__ = inner", True),
    ("def inner(a, b): pass\ndef f(a): pass\nf.__wrapped__ = inner", False),
])
def test_what_a_function_accepts_is_seen_through_wrappers(source, answer):
    assert accepts(_module(source).f, "b") is answer


def test_nothing_of_comfyui_or_torch_is_imported_by_the_form_itself():
    assert "torch" not in vars(sys.modules["qpatch.hooks.compat"])
