"""qpatch among other finders: before it, behind it, polite ones and others."""

import pytest

TARGET = "def f(x):\n    return x\n"

@pytest.fixture
def crowd(bench):
    bench.bring("finders.py")
    bench.write(**{"pkg.target": TARGET})
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
