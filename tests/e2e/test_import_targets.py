"""What a target module looks like after qpatch has mended it, in every way that it can come in."""

import pytest

TARGET = """
    import sys
    during = (type(__loader__).__name__, __spec__.loader is __loader__, sorted(vars(__loader__)))
    def f(x):
        return x
"""


def run(bench, python, code, **how):
    bench.write(**{"pkg.target": TARGET})
    bench.watch("pkg.target")
    return bench.run(python, code, **how)


def test_the_importer_sees_the_module_mended(each_python, bench):
    run(bench, each_python, """
        from pkg.target import f
        assert f(1) == 2
        assert probe.states() == {"pkg.target": "applied"}
    """)


def test_loader_and_spec_are_the_original_ones_during_and_after_the_import(each_python, bench):
    run(bench, each_python, """
        import pkg.target as target
        from importlib.machinery import SourceFileLoader
        assert target.during == ("SourceFileLoader", True, ["name", "path"]), target.during
        assert type(target.__loader__) is SourceFileLoader and target.__spec__.loader is target.__loader__
        assert sorted(vars(target.__loader__)) == ["name", "path"]
        assert "exec_module" not in vars(target.__spec__.loader)
    """)


def test_source_resources_and_pickles_work_as_without_us(each_python, bench):
    (bench.folder / "pkg").mkdir()
    (bench.folder / "pkg" / "data.txt").write_text("data")
    run(bench, each_python, """
        import importlib.resources, inspect, linecache, pickle, pkgutil
        import pkg.target as target
        assert "def f(x)" in inspect.getsource(target)
        assert "def f(x)" in inspect.getsource(target.f.__wrapped__)
        assert inspect.signature(target.f) == inspect.signature(target.f.__wrapped__)
        assert importlib.resources.files("pkg").joinpath("data.txt").read_text() == "data"
        assert pkgutil.get_data("pkg.target", "data.txt") == b"data"
        assert target.__loader__.get_source("pkg.target") == linecache.getlines(target.__file__)[0] + "".join(
            linecache.getlines(target.__file__)[1:])
        assert pickle.loads(pickle.dumps(target.f)) is target.f
        assert pickle.loads(pickle.dumps(target.__loader__)) == target.__loader__
    """)


def test_a_reload_mends_the_fresh_functions_once(each_python, bench):
    run(bench, each_python, """
        import importlib, sys
        import pkg.target as target
        for _ in range(2 * sys.getrecursionlimit()):
            importlib.reload(target)
        assert target.f(1) == 2
        assert not hasattr(target.f.__wrapped__, "__wrapped__")
    """, env={"QPATCH_LOG": "quiet"})


def test_a_module_without_a_spec_can_be_reloaded_as_far_as_python_allows(each_python, bench):
    run(bench, each_python, """
        import importlib
        import pkg.target as target
        target.__spec__ = None
        importlib.reload(target)
        assert target.f(1) == 2
    """)


def test_a_module_that_was_deleted_and_imported_again_is_mended(each_python, bench):
    run(bench, each_python, """
        import sys
        import pkg.target
        first = pkg.target
        del sys.modules["pkg.target"]
        import pkg.target
        assert pkg.target is not first and pkg.target.f(1) == first.f(1) == 2
    """)


@pytest.mark.parametrize("body, state", [
    ("sys.modules[__name__] = other = types.ModuleType(__name__); other.f = lambda x: x", "applied"),
    ("class Own(types.ModuleType):\n    pass\nsys.modules[__name__].__class__ = Own\ndef f(x):\n    return x",
     "applied"),
    ("class Slots:\n    __slots__ = ()\n    def f(self, x):\n        return x\nsys.modules[__name__] = Slots()",
     "incompatible"),
], ids=["another module", "another class", "an object without a namespace"])
def test_a_module_that_puts_something_else_in_its_place(each_python, bench, body, state):
    bench.write(**{"pkg.target": "import sys, types\n" + body})
    bench.watch("pkg.target")
    bench.run(each_python, f"""
        import sys
        import pkg.target
        assert sys.modules["pkg.target"].f(1) == {2 if state == "applied" else 1}
        assert probe.states() == {{"pkg.target": {state!r}}}
    """)


def test_a_private_copy_made_by_hand_is_mended_and_not_confused_with_the_registered_one(each_python, bench):
    run(bench, each_python, """
        import importlib.util
        import pkg.target
        spec = importlib.util.spec_from_file_location("copy", pkg.target.__file__)
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        assert copy.f(1) == 1
        spec = importlib.util.find_spec("pkg.target")
        from qpatch import finder
        spec = finder.Finder.find_spec("pkg.target", pkg.__path__)
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        assert copy.f(1) == pkg.target.f(1) == 2 and copy is not pkg.target
    """)


def test_a_spec_that_is_found_but_never_executed_is_an_ordinary_spec(each_python, bench):
    run(bench, each_python, """
        import copy, importlib.util, pickle
        spec, again = (importlib.util.find_spec("pkg.target") for _ in range(2))
        assert spec == again and hash(vars(spec.loader)["exec_module"]) == hash(vars(again.loader)["exec_module"])
        for other in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec), copy.copy(spec)):
            assert other.loader == spec.loader and other.origin == spec.origin
            module = importlib.util.module_from_spec(other)
            other.loader.exec_module(module)
            assert module.f(1) == 2
        assert "def f" in spec.loader.get_source("pkg.target")
        assert probe.states() == {"pkg.target": "applied"}
    """)


def test_a_lazy_module_is_not_woken_and_is_mended_when_it_wakes(each_python, bench):
    run(bench, each_python, """
        import importlib.util, sys
        def lazily():
            spec = importlib.util.find_spec("pkg.target")
            spec.loader = importlib.util.LazyLoader(spec.loader)
            module = sys.modules["pkg.target"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
        def sleeps(module):
            return type(module).__name__ == "_LazyModule"
        import qpatch
        module = lazily()
        qpatch.activate()
        assert probe.states() == {} and sleeps(module)
        assert module.f(1) == 2
        assert probe.states() == {"pkg.target": "applied"}

        # And one that was found before qpatch stood there.
        ours = next(f for f in sys.meta_path if type(f).__module__ == "qpatch.finder")
        sys.meta_path.remove(ours)
        module = lazily()
        qpatch.activate()
        assert sleeps(module)
        assert module.f(1) == 2
    """)


def test_bytecode_is_the_same_with_and_without_us(each_python, bare, bench):
    bench.write(**{"pkg.target": TARGET})
    cached = bench.folder / "pkg" / "__pycache__"
    bytes_of = {}
    for env in (bare, each_python):
        bench.run(env, "import pkg.target")
        bench.watch("pkg.target")
        (file,) = cached.glob("target.*.pyc")
        bytes_of[env] = file.read_bytes()
        file.unlink()
    assert bytes_of[bare] == bytes_of[each_python]


def test_a_target_of_bytecode_alone_is_mended(each_python, bench):
    run(bench, each_python, """
        import os, py_compile
        py_compile.compile("pkg/target.py", cfile="pkg/target.pyc")
        os.unlink("pkg/target.py")
        import pkg.target
        assert type(pkg.target.__loader__).__name__ == "SourcelessFileLoader"
        assert pkg.target.f(1) == 2
    """)
