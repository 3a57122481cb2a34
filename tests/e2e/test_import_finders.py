"""qpatch among other finders and loaders: before it, behind it, and of kinds that it must leave alone."""

import shutil
from pathlib import Path

import pytest

TARGET = "def f(x):\n    return x\n"

FINDERS = """
    import importlib.util, sys
    from importlib.machinery import PathFinder, SourceFileLoader

    class Passing:
        def find_spec(self, name, path=None, target=None):
            return None

    class Nameless:
        "A finder of the time before find_spec."
        def find_module(self, name, path=None):
            return None

    class Counting(Passing):
        asked = 0
        def find_spec(self, name, path=None, target=None):
            self.asked += name == "pkg.target"
            return None

    class Answering:
        "Finds the target itself, wherever it stands."
        def find_spec(self, name, path=None, target=None):
            return PathFinder.find_spec(name, path, target) if name == "pkg.target" else None

    class AskingAll:
        "As post-import libraries do: asks every finder, itself not twice."
        busy = False
        def find_spec(self, name, path=None, target=None):
            if self.busy or name != "pkg.target":
                return None
            self.busy = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.busy = False

    class AskingOthers:
        "Asks every finder but itself, in turn."
        entered = 0
        def find_spec(self, name, path=None, target=None):
            if name != "pkg.target":
                return None
            self.entered += 1
            for other in sys.meta_path:
                if other is not self and hasattr(other, "find_spec"):
                    spec = other.find_spec(name, path, target)
                    if spec is not None:
                        return spec

    class Raising:
        def find_spec(self, name, path=None, target=None):
            if name == "pkg.target":
                raise OSError("this finder is broken")

    class Lying:
        def find_spec(self, name, path=None, target=None):
            return "not a spec" if name == "pkg.target" else None

    class OwnLoader(SourceFileLoader):
        ran = 0
        def exec_module(self, module):
            OwnLoader.ran += 1
            super().exec_module(module)

    class Subclassing:
        def find_spec(self, name, path=None, target=None):
            spec = PathFinder.find_spec(name, path, target) if name == "pkg.target" else None
            if spec is not None:
                spec.loader = OwnLoader(spec.loader.name, spec.loader.path)
            return spec

    class Shared(SourceFileLoader):
        "One loader for all modules: it goes by the module that it is given."
        def get_filename(self, name):
            return PathFinder.find_spec(name, ["pkg"]).origin
        def exec_module(self, module):
            exec(compile(open(module.__spec__.origin).read(), module.__spec__.origin, "exec"), module.__dict__)

    class Prickly:
        "A loader that does not say AttributeError where it has no attribute."
        def __init__(self, spec):
            self.inner = spec.loader
        def create_module(self, spec):
            return None
        def exec_module(self, module):
            self.inner.exec_module(module)
        def __getattr__(self, name):
            raise RuntimeError(f"ask me for something else than {name}")

    class Pricking:
        def find_spec(self, name, path=None, target=None):
            spec = PathFinder.find_spec(name, path, target) if name == "pkg.target" else None
            if spec is not None:
                spec.loader = Prickly(spec)
            return spec

    class Sharing:
        loader = Shared("shared", "shared.py")
        def find_spec(self, name, path=None, target=None):
            if name in ("pkg.target", "pkg.other"):
                origin = PathFinder.find_spec(name, path, target).origin
                return importlib.util.spec_from_file_location(name, origin, loader=self.loader)
"""


@pytest.fixture
def crowd(bench):
    bench.write(finders=FINDERS, **{"pkg.target": TARGET})
    bench.watch("pkg.target")
    bench.prelude += "import finders, sys\n"
    return bench


PLACES = {"before": "0", "behind all": "len(sys.meta_path)", "before the path finder": "-1"}


@pytest.mark.parametrize("kind, place", [
    *((kind, place) for kind in ("Passing", "Nameless", "Counting", "AskingAll", "AskingOthers") for place in PLACES),
    ("Subclassing", "before the path finder"),
])
def test_a_target_is_mended_with_other_finders_about(each_python, crowd, kind, place):
    crowd.run(each_python, f"""
        other = finders.{kind}()
        sys.meta_path.insert({PLACES[place]}, other)
        before = list(sys.meta_path)
        import pkg.target
        assert pkg.target.f(1) == 2
        assert sys.meta_path == before
        assert getattr(other, "asked", 0) <= 1 and getattr(other, "entered", 0) <= 1
    """, flags=["-W", "ignore::ImportWarning"])


def test_a_loader_class_of_somebody_else_keeps_its_way_of_executing(each_python, crowd):
    crowd.run(each_python, """
        sys.meta_path.insert(1, finders.Subclassing())
        import pkg.target
        assert pkg.target.f(1) == 2 and finders.OwnLoader.ran == 1
        assert type(pkg.target.__loader__) is finders.OwnLoader and "exec_module" not in vars(pkg.target.__loader__)
    """)


def test_a_loader_that_several_modules_share_is_left_alone(each_python, crowd):
    crowd.write(**{"pkg.other": TARGET})
    crowd.run(each_python, """
        sys.meta_path.insert(1, finders.Sharing())
        import importlib.util
        spec = importlib.util.find_spec("pkg.target")
        assert "exec_module" not in vars(finders.Sharing.loader)
        import pkg.other, pkg.target
        assert (pkg.other.f(1), pkg.target.f(1)) == (1, 1)
        assert probe.states() == {"pkg.target": "incompatible"}
    """)


def test_a_loader_that_cannot_even_be_looked_at_is_left_alone(each_python, crowd):
    crowd.run(each_python, """
        sys.meta_path.insert(1, finders.Pricking())
        import pkg.target
        assert pkg.target.f(1) == 1 and probe.states() == {"pkg.target": "incompatible"}
    """)


def test_a_finder_in_front_that_answers_for_a_target_is_named(each_python, crowd):
    crowd.run(each_python, """
        sys.meta_path.insert(0, finders.Answering())
        import pkg.target, qpatch
        assert pkg.target.f(1) == 1
        from qpatch import catalogue, states
        assert states.finders_ahead() == ["finders.Answering"]
        state, why = states.overall(catalogue.named("probe"))
        assert state == "incompatible" and "finders.Answering" in why, why
        qpatch.activate()
        assert pkg.target.f(1) == 2 and states.overall(catalogue.named("probe"))[0] == "applied"
    """)


@pytest.mark.parametrize("kind", ["Raising", "Lying"])
def test_a_faulty_finder_fails_as_it_does_without_us(each_python, bare, crowd, kind):
    code = f"sys.meta_path.insert(1, finders.{kind}())\nimport pkg.target"
    with_us = crowd.finished(each_python, code, check=False)
    without = bare.run(f"import finders, sys\n{code}", cwd=crowd.folder, check=False)
    assert with_us.returncode == without.returncode == 1
    assert with_us.stderr.splitlines()[-1] == without.stderr.splitlines()[-1]


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
