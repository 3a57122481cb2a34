"""``qpatch run`` where no start-up file is read, and ``qpatch selftest`` on an installed copy."""

import json
import sys

import pytest

SCRIPT = """
import sys, pickle
if sys.argv[1:] == ["raise"]:
    raise RuntimeError("the script's own")
if sys.argv[1:] == ["exit"]:
    sys.exit(7)
import beside
class Local: pass
pickle.dumps(Local())
live = [f for f in sys.meta_path if getattr(f, "qpatch_finder", False)]
print(__name__, sys.argv, beside.__name__, len(live), sys.flags.no_site)
"""


@pytest.fixture
def program(tmp_path, installed):
    (tmp_path / "main.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("")

    def run(*words, flags=("-S",)):
        return installed.command("-m", "qpatch", "run", "main.py", *words, cwd=tmp_path, flags=flags,
                                 env={"PYTHONPATH": str(installed.site)}, check=False)

    return run


def test_a_script_runs_as_python_would_run_it_with_the_finder_in_place(program):
    done = program("--json", "--help", "x")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ ['main.py', '--json', '--help', 'x'] beside 1 1\n"


def test_where_start_up_files_are_read_there_is_still_one_finder(program):
    assert program(flags=()).stdout.split()[-2:] == ["1", "0"]


def test_the_scripts_own_error_and_exit_code_come_through(program):
    failed = program("raise")
    assert failed.returncode == 1
    assert "Traceback" in failed.stderr and failed.stderr.endswith("RuntimeError: the script's own\n")
    assert program("exit").returncode == 7


LATER = """
import atexit, os, pickle, threading
class Own: pass
def later(what):
    print(what, type(pickle.loads(pickle.dumps(Own()))) is Own, os.path.isfile(__file__))
def waiting():
    threading.main_thread().join()
    later("thread")
atexit.register(later, "atexit")
threading.Thread(target=waiting).start()
os.chdir(os.path.dirname(os.getcwd()))
"""


@pytest.mark.parametrize("name", ["later.py", "app"])
def test_what_outlives_the_script_still_finds_its_module_and_file(installed, tmp_path, name):
    (tmp_path / "app").mkdir()
    for path in ("later.py", "app/__main__.py"):
        (tmp_path / path).write_text(LATER)
    done = installed.command("-m", "qpatch", "run", name, cwd=tmp_path)
    assert done.stdout.split("\n") == ["thread True True", "atexit True True", ""], done.stderr
    assert list(tmp_path.rglob("later*.pyc")) == []


SHOWN = """
import sys
names = {"__name__", "__file__", "__package__", "__builtins__"}
print({name: globals()[name] for name in sorted(names)}, __spec__ is None, sys.argv, sys.path[0])
def fail(): raise ValueError("own")
fail()
"""


@pytest.mark.parametrize("name", ["links/script.py", "app"])
def test_names_paths_and_traceback_are_those_that_python_gives(installed, tmp_path, name):
    for folder in ("app", "links"):
        (tmp_path / folder).mkdir()
    (tmp_path / "app" / "__main__.py").write_text(SHOWN)
    (tmp_path / "links" / "script.py").symlink_to(tmp_path / "app" / "__main__.py")
    plain, ours = (installed.command(*words, name, "x", cwd=tmp_path, check=False)
                   for words in ((), ("-m", "qpatch", "run")))
    assert ours.returncode == plain.returncode == 1 and ours.stdout == plain.stdout != ""
    # For a folder Python shows frames of its own before the script's.
    assert ours.stderr.startswith("Traceback") and plain.stderr.endswith(ours.stderr.partition("\n")[2])


def test_a_folder_without_a_program_is_refused_in_one_line(installed, tmp_path):
    done = installed.command("-m", "qpatch", "run", ".", cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (2, "qpatch: error: .: there is no __main__.py in it\n")


@pytest.mark.skipif(sys.platform == "win32", reason="a folder in use cannot be removed there")
@pytest.mark.parametrize("verb", ["status", "doctor", "selftest"])
def test_the_commands_work_in_a_working_directory_that_has_been_removed(installed, tmp_path, verb):
    gone = "import os, sys; os.rmdir(os.getcwd()); from qpatch.cli import main; sys.exit(main(sys.argv[1:]))"
    (tmp_path / "gone").mkdir()
    done = installed.command("-c", gone, verb, cwd=tmp_path / "gone", check=False)
    assert done.stderr == "" and done.returncode == (verb == "selftest"), done.stdout


def selftest(venv, **options):
    done = venv.command("-m", "qpatch", "selftest", "--json", check=False, **options)
    report = json.loads(done.stdout)
    return done.returncode, {proof["name"]: proof["outcome"] for proof in report["proofs"]}, report


def test_the_selftest_proves_the_crash_and_its_mend_whatever_switches_the_caller_has_set(installed_with_torch):
    switches = {"QPATCH_DISABLE": "lazy-linear,zimage-fuse"}
    code, outcomes, report = selftest(installed_with_torch, env=switches)
    assert (code, report["all_proved"]) == (0, True)
    assert set(outcomes.values()) == {"proved"}
    claims = {"start-up", "import hook", "off switch", "the fault", "lazy-linear", "zimage-fuse", "sources", "LoRA"}
    assert claims <= set(outcomes)


def test_the_selftest_fails_where_a_hook_is_broken(tmp_path, wheel, installed_with_torch):
    env = type(installed_with_torch)(tmp_path / "venv")
    env.install(wheel)
    env.see_parent()
    hook = env.site / "qpatch" / "hooks" / "lazy_linear.py"
    hook.write_text(hook.read_text().replace("def patches(module):", "def patches(module):\n    return\n", 1))
    code, outcomes, report = selftest(env)
    assert code == 1 and outcomes["lazy Linears"] == "failed"
    (seen,) = [proof["seen"] for proof in report["proofs"] if proof["name"] == "lazy Linears"]
    assert "'NoneType' object has no attribute 'dtype'" in seen


def test_without_torch_the_selftest_proves_the_rest_and_says_what_it_could_not(installed):
    code, outcomes, report = selftest(installed)
    assert code == 1 and report["all_proved"] is False
    assert outcomes == {"start-up": "proved", "import hook": "proved", "off switch": "proved", "loading": "not tried"}
    assert "torch is not installed" in report["proofs"][-1]["seen"]


def test_an_inactive_copy_fails_the_selftest(fresh):
    (fresh.site / "qpatch.pth").unlink()
    (fresh.site / "qpatch.start").unlink()
    code, outcomes, _ = selftest(fresh)
    assert code == 1 and outcomes == {"start-up": "failed", "loading": "not tried"}
