"""Targets that do not come from a plain source file of a plain package."""

import shutil
from pathlib import Path

import pytest

TARGET = "def f(x):\n    return x\n"


def test_a_namespace_package_of_a_target_s_name_is_handed_on_untouched(each_python, bench):
    for folder in ("one", "two"):
        (bench.folder / folder / "pkg" / "target").mkdir(parents=True)
        (bench.folder / folder / "pkg" / "target" / f"{folder}.py").write_text("")
    bench.watch("pkg", "pkg.target")
    bench.run(each_python, """
        import sys
        sys.path[:0] = ["one", "two"]
        import importlib.resources, pkg.target.one, pkg.target.two
        assert type(pkg.target.__path__).__name__ == type(pkg.__path__).__name__ == "_NamespacePath"
        assert len(pkg.target.__path__) == 2
        assert {p.name for p in importlib.resources.files("pkg.target").iterdir()} >= {"one.py", "two.py"}
        assert set(probe.states().values()) == {"incompatible"}
    """)


def test_a_target_inside_a_namespace_package_is_mended(each_python, bench):
    (bench.folder / "one" / "space").mkdir(parents=True)
    (bench.folder / "one" / "space" / "target.py").write_text(TARGET)
    bench.watch("space.target")
    bench.run(each_python, "import sys; sys.path.insert(0, 'one'); import space.target; assert space.target.f(1) == 2")


def test_a_package_that_is_a_target_is_mended_and_finds_its_submodules(each_python, bench):
    bench.write(**{"pkg.sub": TARGET})
    (bench.folder / "pkg" / "__init__.py").write_text(TARGET)
    bench.watch("pkg", "pkg.sub")
    bench.run(each_python, "import pkg.sub; assert pkg.f(1) == pkg.sub.f(1) == 2")


def test_a_package_that_changed_its_path_is_searched_there(each_python, bench):
    bench.write(**{"pkg.other": ""})
    (bench.folder / "elsewhere").mkdir()
    (bench.folder / "elsewhere" / "target.py").write_text(TARGET)
    (bench.folder / "pkg" / "__init__.py").write_text("__path__ = ['elsewhere']\n")
    bench.watch("pkg.target")
    bench.run(each_python, "import pkg.target; assert pkg.target.f(1) == 2 and 'elsewhere' in pkg.target.__file__")


@pytest.mark.parametrize("name, loader", [
    ("__hello__", "FrozenImporter"), ("_pickle", "ExtensionFileLoader"), ("_symtable", "BuiltinImporter"),
])
def test_a_target_that_is_no_source_file_is_left_alone_and_reported(each_python, bench, name, loader):
    bench.watch(name)
    known = each_python.run(f"import importlib.util as u; print(u.find_spec({name!r}).loader)").stdout
    if loader not in known:
        pytest.skip(f"{name} of this Python comes from {known.strip()}")
    bench.run(each_python, f"""
        import importlib
        importlib.import_module({name!r})
        from qpatch import catalogue, states
        state, why = states.overall(catalogue.named("probe"))
        assert (state, {loader!r} in why) == ("incompatible", True), (state, why)
    """)


def test_a_target_in_a_zip_file_is_left_alone_and_reported_and_mended_when_asked(each_python, bench):
    bench.write(**{"inside.pkg.target": TARGET})
    shutil.make_archive(str(bench.folder / "archive"), "zip", bench.folder / "inside")
    bench.watch("pkg.target")
    bench.run(each_python, """
        import sys, importlib.util
        sys.path.insert(0, "archive.zip")
        from qpatch import catalogue, states
        importlib.util.find_spec("pkg.target")
        assert states.overall(catalogue.named("probe"))[0] == "incompatible"
        import pkg.target, qpatch
        assert pkg.target.f(1) == 1 and type(pkg.target.__loader__).__name__ == "zipimporter"
        assert not [n for n in vars(pkg.target.__loader__) if n == "exec_module"]
        (attempt,) = states.attempts(catalogue.named("probe"))
        assert attempt.state == "incompatible" and "zipimporter" in attempt.explanation, attempt
        qpatch.activate()
        assert pkg.target.f(1) == 2 and len(states.attempts(catalogue.named("probe"))) == 1
    """)


def test_a_hook_that_is_off_stays_off_for_targets_that_cannot_be_watched(each_python, bench):
    bench.watch("__hello__")
    bench.run(each_python, """
        import importlib.util
        importlib.util.find_spec("__hello__")
        assert probe.states() == {"__hello__": "disabled"}
    """, env={"QPATCH_DISABLE": "probe"})


@pytest.fixture
def wrapt_folder(tmp_path_factory):
    """A folder with wrapt alone in it; where its C extension does not fit it runs as plain Python."""
    wrapt = pytest.importorskip("wrapt")
    folder = tmp_path_factory.mktemp("wrapt")
    shutil.copytree(Path(wrapt.__file__).parent, folder / "wrapt", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.parametrize("order", ["wrapt in front", "wrapt behind", "wrapt at once and again"])
def test_wrapt_s_post_import_hooks_and_ours_both_act(each_python, bench, wrapt_folder, order):
    bench.write(**{"pkg.target": TARGET})
    bench.watch("pkg.target")
    bench.run(each_python, f"""
        import sys
        sys.path.append({str(wrapt_folder)!r})
        import wrapt, qpatch
        seen = []
        wrapt.register_post_import_hook(lambda module: seen.append(module.f(1)), "pkg.target")
        if {order!r} == "wrapt behind":
            sys.meta_path.sort(key=lambda finder: type(finder).__module__ != "qpatch.finder")
        import pkg.target
        assert pkg.target.f(1) == 2 and len(seen) == 1, seen
        assert type(pkg.target.__loader__).__name__ == "SourceFileLoader"
        assert pkg.target.__spec__.loader is pkg.target.__loader__
        if {order!r} == "wrapt at once and again":
            wrapt.wrap_function_wrapper(pkg.target, "f", lambda wrapped, instance, args, kwargs: wrapped(*args) * 10)
            assert pkg.target.f(1) == 20 and probe.states() == {{"pkg.target": "applied"}}
            del sys.modules["pkg.target"]
            wrapt.register_post_import_hook(lambda module: seen.append(module.f(1)), "pkg.target")
            import pkg.target
            assert pkg.target.f(1) == 2 and len(seen) == 2
    """)


def test_a_target_that_is_installed_editable_is_mended(each_python, bench):
    # What setuptools leaves for an editable install: a finder at the end of sys.meta_path that maps names to files.
    bench.write(editable_finder="""
        import sys
        from importlib.util import spec_from_file_location
        class Editable:
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                if name == "nunchaku":
                    return spec_from_file_location(name, "checkout/nunchaku/__init__.py")
                if name == "nunchaku.flat":
                    return spec_from_file_location(name, "checkout/elsewhere/flat.py")
        sys.meta_path.append(Editable)
    """, **{"checkout.nunchaku.inner": TARGET, "checkout.elsewhere.flat": TARGET})
    bench.watch("nunchaku.inner", "nunchaku.flat")
    bench.run(each_python, """
        import editable_finder, nunchaku.inner, nunchaku.flat
        assert nunchaku.inner.f(1) == nunchaku.flat.f(1) == 2
    """)
