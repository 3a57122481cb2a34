"""Threads and processes: nothing of qpatch waits for a lock that another thread holds, and nobody misses a patch."""

import os

import pytest

TARGET = "def f(x):\n    return x\n"

# A deadlock ends the child with the stacks of all threads instead of the test run's own time limit.
LIMIT = "import faulthandler; faulthandler.dump_traceback_later(30, exit=True)"


def run(bench, python, code, **how):
    bench.prelude += LIMIT + "\n"
    return bench.run(python, code, **how)


def test_a_thread_that_probes_does_not_send_another_thread_s_import_past_us(each_python, bench):
    bench.write(**{"pkg.target": TARGET})
    bench.watch("pkg.target")
    run(bench, each_python, """
        import importlib, importlib.util, sys, threading
        import pkg
        from qpatch.finder import Finder
        sys.setswitchinterval(1e-6)
        done = threading.Event()

        def probe_on():
            while not done.is_set():
                Finder.find_spec("pkg.target", pkg.__path__)

        threads = [threading.Thread(target=probe_on) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(150):
                sys.modules.pop("pkg.target", None)
                assert importlib.import_module("pkg.target").f(1) == 2
        finally:
            done.set()
            for thread in threads:
                thread.join()
    """)


def test_activation_beside_imports_never_mends_a_module_twice(each_python, bench):
    bench.write(**{f"pkg.target{number}": TARGET for number in range(8)})
    bench.watch(*(f"pkg.target{number}" for number in range(8)))
    run(bench, each_python, """
        import importlib, sys, threading
        import qpatch
        sys.setswitchinterval(1e-6)
        done = threading.Event()

        def activate_on():
            while not done.is_set():
                qpatch.activate()

        def import_all():
            for _ in range(20):
                for number in range(8):
                    assert importlib.import_module(f"pkg.target{number}").f(1) == 2

        def forget():
            for _ in range(20):
                for number in range(8):
                    sys.modules.pop(f"pkg.target{number}", None)

        helpers = [threading.Thread(target=activate_on) for _ in range(2)]
        for thread in helpers:
            thread.start()
        try:
            for _ in range(20):
                forget()
                import_all()
        finally:
            done.set()
            for thread in helpers:
                thread.join()
        assert qpatch.activation_error is None, qpatch.activation_error
    """)


def test_the_finder_needs_no_module_lock(each_python, bench):
    bench.write(**{"pkg.target": TARGET})
    bench.watch("pkg.target")
    run(bench, each_python, """
        import importlib._bootstrap as bootstrap, threading
        import pkg
        from qpatch.finder import Finder
        found = []
        names = ("pkg", "pkg.target", "qpatch", "qpatch.finder", "qpatch.engine")
        locks = [bootstrap._get_module_lock(name) for name in names]
        for lock in locks:
            lock.acquire()
        find = lambda: found.append(Finder.find_spec("pkg.target", pkg.__path__))
        thread = threading.Thread(target=find, daemon=True)
        thread.start()
        thread.join(10)
        for lock in locks:
            lock.release()
        assert found and found[0].name == "pkg.target"
    """)


@pytest.mark.parametrize("name", ["pkg.target", "__hello__", "missing"])
def test_one_small_module_is_imported_while_importlib_holds_its_global_lock(each_python, bench, name):
    bench.write(**{"pkg.target": TARGET})
    bench.watch(name)
    bench.run(each_python, f"""
        import sys
        parent = __import__("pkg").__path__ if {name!r}.startswith("pkg") else None
        from qpatch.finder import Finder
        before = set(sys.modules)
        Finder.find_spec({name!r}, parent)
        assert set(sys.modules) - before == {{"qpatch.shadow"}}, set(sys.modules) - before
    """)


def test_that_module_is_loaded_under_the_global_lock_also_when_the_finder_is_called_by_hand(each_python, bench):
    bench.watch("missing")
    bench.run(each_python, """
        import _imp, sys
        from importlib.machinery import PathFinder
        held = []

        class Witness:
            def find_spec(self, name, path=None, target=None):
                if name == "qpatch.shadow":
                    spec = PathFinder.find_spec(name, path, target)
                    execute = spec.loader.exec_module
                    spec.loader.exec_module = lambda module: (held.append(_imp.lock_held()), execute(module))
                    return spec

        sys.meta_path.insert(1, Witness())
        from qpatch.finder import Finder
        Finder.find_spec("missing")
        assert held == [True] and not _imp.lock_held()
    """)


def test_two_threads_whose_hooks_import_each_other_s_targets(each_python, bench):
    bench.write(
        cross_probe="""
            from probe import finding, patches
            def examine(module):
                # The statement accepts a module that another thread has not finished; import_module raises.
                if module.__name__ == "pkg.one":
                    import pkg.two
                else:
                    import pkg.one
                return finding.needed("")
        """,
        **{f"pkg.{name}": "import time\ntime.sleep(0.02)\n" + TARGET for name in ("one", "two")},
    )
    bench.watch("pkg.one", "pkg.two", implementation="cross_probe")
    run(bench, each_python, """
        import importlib, sys, threading
        import pkg
        for _ in range(10):
            barrier = threading.Barrier(2)

            def bring(name):
                barrier.wait()
                importlib.import_module(name)

            threads = [threading.Thread(target=bring, args=(name,)) for name in ("pkg.one", "pkg.two")]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            modules = [sys.modules.pop(name) for name in ("pkg.one", "pkg.two")]
            assert [module.f(1) for module in modules] == [2, 2]
    """, env={"QPATCH_LOG": "quiet"})


def test_a_body_that_waits_for_a_thread_which_imports_a_target(each_python, bench):
    bench.write(**{
        "pkg.target": TARGET,
        "pkg.body": "import threading\n"
                    "def bring():\n    global target\n    import pkg.target as target\n"
                    "thread = threading.Thread(target=bring)\nthread.start()\nthread.join()\n",
    })
    bench.watch("pkg.target", "pkg.body", defines=())
    run(bench, each_python, "import pkg.body; assert pkg.body.target.f(1) == 2", env={"QPATCH_LOG": "quiet"})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_inside_a_hook_leaves_both_processes_able_to_import(each_python, bench):
    bench.write(forking_probe="""
        import os
        from probe import finding, patches
        def examine(module):
            child = os.fork()
            if child == 0:
                import pkg.second
                os._exit(pkg.second.f(1) != 2)
            assert os.waitpid(child, 0)[1] == 0, "the child could not import"
            return finding.needed("")
    """, **{"pkg.target": TARGET, "pkg.second": TARGET})
    bench.watch("pkg.target", implementation="forking_probe")
    bench.watch("pkg.second", name="second")
    run(bench, each_python, "import pkg.target; assert pkg.target.f(1) == 2", env={"QPATCH_STRICT": "1"})


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_child_processes_of_multiprocessing_have_their_targets_mended(each_python, bench, method):
    bench.write(work="def call(x):\n    import pkg.target\n    return pkg.target.f(x)\n", main=f"""
        import probe; probe.watch("pkg.target")
        import multiprocessing
        from work import call
        if __name__ == "__main__":
            if {method!r} not in multiprocessing.get_all_start_methods():
                raise SystemExit(0)
            with multiprocessing.get_context({method!r}).Pool(1) as pool:
                assert pool.map(call, [1, 2]) == [2, 3]
    """, **{"pkg.target": TARGET})
    each_python.command(bench.folder / "main.py", cwd=bench.folder)


def test_many_threads_import_many_targets(each_python, bench):
    bench.write(**{f"pkg.target{number}": TARGET for number in range(16)})
    bench.watch(*(f"pkg.target{number}" for number in range(16)))
    run(bench, each_python, """
        import importlib, sys, threading
        sys.setswitchinterval(1e-6)
        wrong = []

        def bring(offset):
            for number in range(16):
                module = importlib.import_module(f"pkg.target{(number + offset) % 16}")
                if module.f(1) != 2:
                    wrong.append(module.__name__)

        threads = [threading.Thread(target=bring, args=(offset,)) for offset in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and set(probe.states().values()) == {"applied"} and len(probe.states()) == 16
    """, env={"QPATCH_LOG": "quiet"})
