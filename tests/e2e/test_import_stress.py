"""Everything at once: storms of threads, of reloads, of failures and of forks."""

import os

import pytest

TARGET = "def f(x):\n    return x\n"


def run(bench, python, code, **how):
    return bench.run(python, code, env={"QPATCH_LOG": "quiet"}, **how)


def test_sixty_four_threads_import_targets_others_and_the_standard_library(each_python, stormy):
    run(stormy, each_python, """
        STANDARD = ["json", "decimal", "xml.dom.minidom", "email.mime.text", "wsgiref.handlers", "unittest.mock"]

        def work(number):
            for step in range(12):
                at = (number + step) % 12
                assert importlib.import_module(f"pkg.target{at}").f(1) == 2
                assert importlib.import_module(f"other.plain{at}").f(1) == 1
                importlib.import_module(STANDARD[at % 6])

        assert storm(64, work) == []
        assert set(probe.states().values()) == {"applied"} and len(probe.states()) == 12
        for number in range(12):
            assert layers_of_ours(sys.modules[f"pkg.target{number}"].f) == 1
            assert "exec_module" not in vars(sys.modules[f"pkg.target{number}"].__loader__)
    """)


def test_a_storm_of_reloads_leaves_one_layer(each_python, stormy):
    run(stormy, each_python, """
        import pkg.target0, pkg.target1

        modules = pkg.target0, pkg.target1

        def work(number):
            for _ in range(15):
                try:
                    importlib.reload(modules[number % 2])
                except (ImportError, KeyError) as error:
                    # A reload takes the module out of sys.modules for a moment and puts it back: CPython's
                    # own race, seen without qpatch too. Another thread's reload may meet that moment.
                    assert "not in sys.modules" in str(error) or error.args == (modules[number % 2].__name__,), error

        assert storm(16, work) == []
        for module in (pkg.target0, pkg.target1):
            assert module.f(1) == 2 and layers_of_ours(module.f) == 1
            assert "exec_module" not in vars(module.__loader__)
    """)


def test_a_storm_of_activations_puts_one_finder(each_python, stormy):
    run(stormy, each_python, """
        import qpatch
        from qpatch import finder
        sys.meta_path[:] = [other for other in sys.meta_path if not finder.is_ours(other)]

        def work(number):
            if number % 2:
                importlib.import_module(f"pkg.target{number % 12}")
            qpatch.activate()

        assert storm(32, work) == [] and qpatch.activation_error is None
        for number in range(1, 12, 2):
            assert sys.modules[f"pkg.target{number}"].f(1) == 2
            assert layers_of_ours(sys.modules[f"pkg.target{number}"].f) == 1
    """)


def test_a_target_that_fails_in_all_threads_is_mended_for_all_after_its_repair(each_python, stormy):
    stormy.write(**{"pkg.target0": "raise OSError('no such library')\n"})
    run(stormy, each_python, """
        def work(number):
            importlib.import_module("pkg.target0")

        raised = storm(64, work)
        assert len(raised) == 64 and {str(error) for error in raised} == {"no such library"}, raised[:3]
        assert "pkg.target0" not in sys.modules and not probe.states()
        with open("pkg/target0.py", "w") as file:
            file.write("def f(x):\\n    return x\\n\\n# repaired\\n")
        importlib.invalidate_caches()
        assert storm(64, work) == []
        assert sys.modules["pkg.target0"].f(1) == 2 and layers_of_ours(sys.modules["pkg.target0"].f) == 1
    """)


def test_targets_that_import_each_other_in_a_circle_from_many_threads(each_python, stormy):
    stormy.write(**{f"pkg.target{number}": f"import pkg.target{(number + 1) % 4}\n{TARGET}" for number in range(4)})
    run(stormy, each_python, """
        def work(number):
            __import__(f"pkg.target{number % 4}")

        # Python gives up some of these by itself, where two threads would wait for each other.
        assert {type(error).__name__ for error in storm(32, work)} <= {"_DeadlockError"}
        for number in range(4):
            __import__(f"pkg.target{number}")
            assert sys.modules[f"pkg.target{number}"].f(1) == 2
            assert layers_of_ours(sys.modules[f"pkg.target{number}"].f) == 1
    """)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forks_in_the_middle_of_other_threads_imports_can_import(each_python, stormy):
    """The child has only the thread that forked; a lock of ours that another one held would stay held for ever."""
    run(stormy, each_python, """
        import os, signal
        # A module that another thread is in the middle of is closed to the child, with us or without:
        # so what all imports share is imported first.
        import pkg.target11
        done = threading.Event()

        def keep_importing(number):
            while not done.is_set():
                del sys.modules[importlib.import_module(f"pkg.target{number}").__name__]

        threads = [threading.Thread(target=keep_importing, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            for number in range(30):
                child = os.fork()
                if child == 0:
                    signal.alarm(20)
                    fits = importlib.import_module(f"pkg.target{6 + number % 6}").f(1) == 2
                    os._exit(not fits)
                assert os.waitpid(child, 0)[1] == 0
        finally:
            done.set()
            for thread in threads:
                thread.join()
    """, flags=["-W", "ignore::DeprecationWarning"])


def test_each_sub_interpreter_has_its_own_finder(each_python, stormy):
    """site runs in each of them, and modules of Python code are their own."""
    stormy.write(within="""
        import probe
        assert probe.finders() == 1
        probe.watch("pkg.target0")
        import pkg.target0
        assert pkg.target0.f(1) == 2
    """)
    run(stormy, each_python, """
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        import os
        for _ in range(3):
            made = interpreters.create()
            failure = interpreters.run_string(made, f"import sys; sys.path.insert(0, {os.getcwd()!r}); import within")
            assert failure is None, failure
            interpreters.destroy(made)
        import pkg.target0
        assert layers_of_ours(pkg.target0.f) == 1
    """, flags=["-W", "ignore"])
