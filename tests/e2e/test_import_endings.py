"""A process that ends in the middle of an import, and targets that end it themselves."""

import pytest

TARGET = "def f(x):\n    return x\n"

ENDINGS = {
    "a daemon thread is inside the body of a target": """
        def bring():
            import pkg.slow
        threading.Thread(target=bring, daemon=True).start()
        time.sleep(0.1)
    """,
    "a daemon thread is inside a hook": """
        def bring():
            import pkg.target0
        probe.examine = lambda module: time.sleep(10)
        threading.Thread(target=bring, daemon=True).start()
        time.sleep(0.1)
    """,
    "a thread goes on importing after the main one": """
        def bring():
            time.sleep(0.1)
            import pkg.target0
            assert pkg.target0.f(1) == 2
        threading.Thread(target=bring).start()
    """,
    "an exit handler imports a target": """
        import atexit
        def bring():
            import pkg.target0
            assert pkg.target0.f(1) == 2
        atexit.register(bring)
    """,
    "a finalizer imports a target when modules are gone": """
        class Late:
            def __del__(self):
                try:
                    import pkg.target0
                except ImportError:
                    pass
        sys.late = Late()
    """,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_interpreter_that_ends_in_the_middle_of_an_import_ends_silently(each_python, stormy, ending):
    stormy.write(**{"pkg.slow": "import time\ntime.sleep(10)\n" + TARGET})
    stormy.prelude += "import time\n"
    done = stormy.finished(each_python, ENDINGS[ending], env={"QPATCH_LOG": "quiet"}, timeout=30)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("body, code", [("raise SystemExit(7)", 7), ("import os; os._exit(9)", 9),
                                        ("raise KeyboardInterrupt", -2)])
def test_a_target_whose_body_ends_the_process_ends_it_as_without_us(each_python, bare, stormy, body, code):
    stormy.write(**{"pkg.target0": body + "\n"})
    ours = stormy.finished(each_python, "import pkg.target0", check=False)
    theirs = bare.run("import pkg.target0", cwd=stormy.folder, check=False)
    assert ours.returncode == theirs.returncode == code
    assert ours.stderr.splitlines()[-1:] == theirs.stderr.splitlines()[-1:]
    assert "qpatch" not in ours.stderr
