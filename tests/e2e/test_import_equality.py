"""A program behaves with qpatch as it does without: output, errors, exit code, byte for byte."""

import pytest

BODIES = {
    "a syntax error": "def f(x:\n    return x\n",
    "an exception in the body": "def f(x):\n    return helper(x)\ndef helper(x):\n    raise ValueError('no')\nf(1)\n",
    "a missing import": "import no_such_module\n",
    "an import error": "raise ImportError('not here')\n",
    "an exception below it": "from pkg import below\n",
    "a keyboard interrupt": "raise KeyboardInterrupt\n",
    "an exit": "import sys\nsys.exit(7)\n",
    "a null byte": "x = 1\0\n",
    "a wrong encoding": "# coding: no-such-codec\n",
    "two exceptions": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('second')\n",
}


def outcome(done):
    return done.stdout, done.stderr, done.returncode


@pytest.mark.parametrize("body, how", [
    *((body, "import pkg.target") for body in BODIES),
    *((body, "import importlib; importlib.import_module('pkg.target')") for body in list(BODIES)[:3]),
])
def test_a_target_that_cannot_be_imported_fails_as_without_us(each_python, bare, bench, body, how):
    bench.write(**{"pkg.below": "raise RuntimeError('below')\n", "pkg.target": ""})
    (bench.folder / "pkg" / "target.py").write_text(BODIES[body])
    stdout, stderr, code = outcome(bench.finished(bare, how, check=False))
    # In front on the same line, so that line numbers stay.
    prelude = "import probe; probe.watch('pkg.target'); "
    with_us = bench.finished(each_python, prelude + how, check=False)
    assert code != 0
    told = _told(with_us.stderr.replace(prelude, ""), each_python)
    assert (with_us.stdout, told, with_us.returncode) == (stdout, _told(stderr, bare), code)


def _told(text, env):
    """The lines of a traceback, but for those on which the two runs may differ."""
    # Newer Pythons underline the place in the -c line, and the prelude moves it.
    lines = [line for line in text.splitlines() if line.strip(" ^~")]
    if env.version == "3.10":
        # It shows its import machinery where importlib.import_module is the way in, and one frame
        # of ours cannot be taken out there.
        lines = [line for line in lines if "_call_with_frames_removed" not in line]
    return lines


def test_a_target_that_failed_is_mended_when_it_is_imported_again_after_a_fix(each_python, bench):
    bench.write(**{"pkg.target": "def f(x:\n"})
    bench.watch("pkg.target")
    bench.run(each_python, """
        import importlib, pathlib, sys
        for text in ("def f(x:", "raise ValueError", "def f(x):\\n    return x + 0 * 12345"):
            pathlib.Path("pkg/target.py").write_text(text)
            importlib.invalidate_caches()
            try:
                import pkg.target
            except (SyntaxError, ValueError):
                assert "pkg.target" not in sys.modules and probe.states() == {}
        assert pkg.target.f(1) == 2
    """, flags=["-B"])


def test_a_reload_that_fails_leaves_the_mended_module(each_python, bench):
    bench.write(**{"pkg.target": "def f(x):\n    return x\n"})
    bench.watch("pkg.target")
    bench.run(each_python, """
        import importlib, pathlib
        import pkg.target
        pathlib.Path("pkg/target.py").write_text("def f(x:")
        try:
            importlib.reload(pkg.target)
        except SyntaxError:
            assert pkg.target.f(1) == 2
            assert probe.states() == {"pkg.target": "applied"}
        else:
            raise AssertionError("the reload was to fail")
    """, flags=["-B"])


PROGRAMS = {
    "many imports": "import json, email, http.client, xml.dom.minidom, asyncio, unittest; print(sorted(json.__dict__))",
    "warnings": "import warnings; warnings.warn('careful')",
    "an uncaught exception": "def f(): raise ValueError('no')\nf()",
    "an exit code": "import sys; print('out'); sys.exit(7)",
    "a module that is missing": "import pkg.missing",
    "introspection": "import importlib.util as u; print(u.find_spec('json').origin); "
                     "print(sorted(vars(u.find_spec('pkg.linear').loader)))",
    "a linear and a zimage of somebody else": "import pkg.linear, pkg.zimage; print(pkg.linear.f(1), pkg.zimage.f(1))",
    "logging": "import logging; logging.basicConfig(); logging.warning('x'); "
               "print(sorted(logging.root.manager.loggerDict))",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_without_targets_behaves_as_without_us(each_python, bare, bench, program):
    source = "def f(x):\n    return x\n"
    bench.write(**{"pkg.linear": source, "pkg.zimage": source, "main": PROGRAMS[program]})
    command = [bench.folder / "main.py"]
    assert outcome(each_python.command(*command, check=False, cwd=bench.folder)) == outcome(
        bare.command(*command, check=False, cwd=bench.folder))


@pytest.mark.parametrize("arguments", [
    ["-m", "pkg.target"], ["-m", "json.tool", "--help"], ["-c", "import runpy; runpy.run_module('pkg.target')"],
    ["-m", "timeit", "-n", "1", "-r", "1", "pass", "--help"],
], ids=" ".join)
def test_running_a_module_is_untouched(each_python, bare, bench, arguments):
    bench.write(**{"pkg.target": "def f(x):\n    return x\nprint(__name__, f(1))\n"})
    assert outcome(each_python.command(*arguments, check=False, cwd=bench.folder)) == outcome(
        bare.command(*arguments, check=False, cwd=bench.folder))


def test_pip_says_the_same_and_builds_in_isolation(fresh, tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n')
    (tmp_path / "backend.py").write_text(
        "import sys, zipfile\n"
        "def build_wheel(folder, config_settings=None, metadata_directory=None):\n"
        "    print(sum(type(f).__module__ == 'qpatch.finder' for f in sys.meta_path), 'finder')\n"
        "    name, info = 'trivial-1-py3-none-any.whl', 'trivial-1.dist-info/'\n"
        "    with zipfile.ZipFile(folder + '/' + name, 'w') as wheel:\n"
        "        wheel.writestr(info + 'METADATA', 'Metadata-Version: 2.1\\nName: trivial\\nVersion: 1\\n')\n"
        "        wheel.writestr(info + 'WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n"
        "        wheel.writestr(info + 'RECORD', '')\n"
        "    return name\n")
    import pip

    # pip of the tests' environment, run by the interpreter that has qpatch.
    see_pip = {"PYTHONPATH": str(tmp_path / "pip_only")}
    (tmp_path / "pip_only").mkdir()
    (tmp_path / "pip_only" / "pip").symlink_to(pip.__path__[0], target_is_directory=True)
    command = ["-m", "pip", "install", "--no-index", "-v", "--disable-pip-version-check", tmp_path]
    done = fresh.command(*command, env=see_pip)
    assert "Successfully installed trivial" in done.stdout
    # The backend is heard on standard error by this pip, and on standard output by newer ones.
    assert "1 finder" in done.stdout + done.stderr
    assert "Error processing line" not in done.stdout + done.stderr
    with_us, off = (fresh.command("-m", "pip", "--version", env={**see_pip, "QPATCH": value}) for value in "10")
    assert outcome(with_us) == outcome(off)
