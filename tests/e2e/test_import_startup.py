"""What an interpreter start does with qpatch installed, on each Python there is."""

import ast
import os
import subprocess

import pytest

FLAGS = [(), ("-I",), ("-E",), ("-s",), ("-P",), ("-B",), ("-OO",), ("-X", "dev")]
COUNT = "import sys; print(sum(type(f).__module__ == 'qpatch.finder' for f in sys.meta_path))"
MODULES = "import sys; print(sorted(sys.modules))"


def supported(env, flags):
    if "-P" in flags and env.run("import sys; print(sys.version_info >= (3, 11))").stdout.strip() == "False":
        pytest.skip("-P came with Python 3.11")
    return flags


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "".join(flags) or "none")
def test_one_finder_and_two_modules_and_nothing_else_come_with_a_start(each_python, bare, flags):
    flags = supported(each_python, flags)
    with_us, without = (ast.literal_eval(env.run(MODULES, flags=flags).stdout) for env in (each_python, bare))
    assert set(with_us) - set(without) == {"qpatch", "qpatch.finder"}
    # A venv runs its .pth files twice.
    assert each_python.run(COUNT, flags=flags).stdout.strip() == "1"


def test_a_start_without_site_is_a_start_without_qpatch(each_python):
    assert each_python.run(COUNT, flags=["-S"]).stdout.strip() == "0"
    told = each_python.run(
        f"import sys; sys.path.append({str(each_python.site)!r}); from qpatch import states;"
        "print(states.standing(), states.live(), states.snapshot()[0]['state'])", flags=["-S"],
    )
    assert told.stdout.strip() == "None False waiting"


def test_off_means_that_nothing_but_the_first_module_is_loaded(each_python, bare):
    finders = "import sys; print(sys.meta_path)"
    off = {"QPATCH": "0"}
    assert each_python.run(finders, env=off).stdout == bare.run(finders).stdout
    with_us = ast.literal_eval(each_python.run(MODULES, env=off).stdout)
    assert set(with_us) - set(ast.literal_eval(bare.run(MODULES).stdout)) == {"qpatch"}


def test_off_wins_over_every_other_toggle_and_is_reported(each_python):
    told = each_python.run(
        "from qpatch import states; print({row['state'] for row in states.snapshot()}, states.live())",
        env={"QPATCH": " OFF ", "QPATCH_ENABLE": "lazy-linear"},
    )
    assert told.stdout.strip() == "{'disabled'} False"


def test_activating_again_changes_nothing(each_python):
    code = "import qpatch; [qpatch.activate() for _ in range(5)]\n" + COUNT
    assert each_python.run(code).stdout.strip() == "1"


def test_warnings_as_errors_do_not_disturb_a_start(each_python):
    done = each_python.run("import qpatch; print(qpatch.activation_error)", env={"PYTHONWARNINGS": "error"})
    assert (done.stdout.strip(), done.stderr) == ("None", "")


@pytest.mark.skipif(os.name == "nt", reason="Windows does not remove a folder that somebody stands in")
def test_a_start_in_a_deleted_folder(each_python, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f'cd "{gone}" && rmdir "{gone}" && exec "{each_python.python}" -c "{COUNT}"'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "1", "")


def test_a_start_reads_two_files_and_starts_no_process_and_opens_no_connection(fresh):
    # Sorted before qpatch.pth, so that it listens when that one is read.
    (fresh.site / "aaa.pth").write_text("import listener\n")
    (fresh.site / "listener.py").write_text(
        "import sys\nseen = []\n"
        "sys.addaudithook(lambda event, arguments: seen.append((event, str(arguments[0]) if arguments else '')))\n"
    )
    seen = ast.literal_eval(fresh.run("import listener; print(list(listener.seen))").stdout)
    opened = {path.rsplit("/", 1)[1] for event, path in seen if event == "open" and "qpatch" in path}
    version = fresh.run("import sys; print(sys.implementation.cache_tag)").stdout.strip()
    assert opened == {"qpatch.pth", f"__init__.{version}.pyc", f"finder.{version}.pyc"}
    assert not {event for event, _ in seen if event.startswith(("subprocess.", "socket.", "os.system", "os.fork"))}


@pytest.mark.parametrize(
    "fault", ["raise SystemExit(3)", "raise ValueError('broken')", "def (", "import missing_module"])
def test_a_broken_finder_is_kept_for_status_and_does_not_touch_the_start(fresh, fault):
    (fresh.site / "qpatch" / "finder.py").write_text(fault + "\n")
    done = fresh.run("import qpatch, sys; print(type(qpatch.activation_error).__name__)\n" + COUNT)
    known = {"raise S": "SystemExit", "raise V": "ValueError", "def (": "SyntaxError"}
    kind = known.get(fault[:7], "ModuleNotFoundError")
    assert (done.stdout.split(), done.stderr) == ([kind, "0"], "")


@pytest.mark.parametrize("module", ["engine", "shadow", "catalogue"])
def test_a_broken_module_of_ours_does_not_stop_the_import_of_a_target(fresh, bench, module):
    (fresh.site / "qpatch" / f"{module}.py").write_text("raise ValueError('broken')\n")
    bench.write(**{"nunchaku.models.linear": "class SVDQW4A4Linear: pass"})
    told = bench.run(fresh, "import nunchaku.models.linear, qpatch; print(repr(qpatch.activation_error))")
    assert told == "ValueError('broken')"


@pytest.mark.parametrize("left", ["nothing", "an empty folder"])
def test_start_up_files_that_outlive_the_package_cost_a_message_of_site_and_no_more(fresh, left):
    for path in sorted((fresh.site / "qpatch").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    if left == "nothing":
        (fresh.site / "qpatch").rmdir()
    done = fresh.run("print('still here')")
    assert done.stdout == "still here\n"
    assert "qpatch.pth" in done.stderr
    fresh.uninstall("qpatch")
    assert fresh.run("print('still here')").stderr == ""


def test_a_folder_of_the_same_name_in_front_does_not_end_the_start(each_python, tmp_path):
    (tmp_path / "qpatch").mkdir()
    (tmp_path / "qpatch" / "__init__.py").write_text("")
    done = each_python.run("print('still here')", env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout == "still here\n"


def test_the_current_folder_does_not_shadow_the_package_at_start(each_python, tmp_path):
    (tmp_path / "qpatch").mkdir()
    (tmp_path / "qpatch" / "__init__.py").write_text("")
    assert each_python.run(COUNT, cwd=tmp_path).stdout.strip() == "1"


def test_a_pth_file_that_is_read_later_may_bring_the_target(fresh, tmp_path):
    (tmp_path / "nunchaku" / "models").mkdir(parents=True)
    (tmp_path / "nunchaku" / "models" / "linear.py").write_text("")
    (fresh.site / "zzz.pth").write_text(f"{tmp_path}\n")
    told = fresh.run("import nunchaku.models.linear; from qpatch import states; print(states.snapshot()[0]['state'])")
    assert told.stdout.strip() == "incompatible"


def test_a_folder_that_is_no_site_folder_does_not_activate_by_itself_but_by_a_call(each_python, bare, wheel):
    with_path = {"PYTHONPATH": str(each_python.site)}
    assert bare.run(COUNT, env=with_path).stdout.strip() == "0"
    code = "import qpatch; qpatch.activate(); from qpatch import states; print(states.live())"
    assert bare.run(code, env=with_path).stdout.strip() == "True"
    assert bare.run("from qpatch import states; print(states.live())", env=with_path).stdout.strip() == "False"


def test_a_user_site_works_and_minus_s_leaves_it_out(each_python, tmp_path):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "QPATCH"))}
    with_user = {**clean, "PYTHONUSERBASE": str(tmp_path)}

    def ask(code, *flags):
        command = [each_python.base, *flags, "-c", code]
        done = subprocess.run(command, env=with_user, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    user_site = ask("import site, os; os.makedirs(site.getusersitepackages()); print(site.getusersitepackages())")
    each_python.copy_qpatch(user_site)
    assert ask(COUNT) == "1"
    assert ask(COUNT, "-s") == "0"


def test_the_first_copy_wins_and_a_second_one_stays_out(each_python, bench):
    told = bench.run(each_python, """
        import sys, types, qpatch
        first = sys.meta_path[0]
        for name in [name for name in sys.modules if name.partition(".")[0] == "qpatch"]:
            del sys.modules[name]
        sys.modules["nunchaku.models.linear"] = types.ModuleType("nunchaku.models.linear")
        import qpatch
        qpatch.__version__ = "0.2.0"
        qpatch.activate()
        assert "qpatch.engine" not in sys.modules, "the second copy has begun to patch"
        from qpatch import finder, states
        assert sys.meta_path[0] is first and not isinstance(first, finder.Finder)
        assert sum(finder.is_ours(other) is not None for other in sys.meta_path) == 1
        print(states.standing())
    """)
    assert told == each_python.run("import qpatch; print(qpatch.__version__)").stdout.strip()
