"""The forms of installation that people have, with real pip in fresh environments."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FINDERS = "import sys; print(sum(hasattr(f, 'qpatch_finder') for f in sys.meta_path))"


def finders(venv, **options) -> int:
    """How many finders of ours an interpreter start puts in place."""
    done = venv.run(FINDERS, **options)
    assert done.stderr == ""
    return int(done.stdout)


def qpatch(venv, *words, **options):
    return venv.command("-m", "qpatch", *words, check=False, **options)


def checks(venv, **options) -> dict:
    report = json.loads(qpatch(venv, "doctor", "--json", **options).stdout)
    return {check["name"]: check for check in report["checks"]}


@pytest.fixture
def empty(tmp_path, installed):
    """An environment without qpatch in it."""
    return type(installed)(tmp_path / "empty")


@pytest.fixture(scope="module")
def target(tmp_path_factory, wheel):
    """A folder that pip installed qpatch into with --target."""
    folder = tmp_path_factory.mktemp("target") / "packages"
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet",
                           "--target", str(folder), str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("flags", [(), ("-I",), ("-E",), ("-s",)])
def test_an_installed_copy_is_live_under_the_switches_that_leave_site_alone(installed, flags):
    done = qpatch(installed, "status", "--json", flags=flags)
    assert done.returncode == 0 and json.loads(done.stdout)["live"] is True


def test_the_console_script_says_the_same_as_the_module(installed):
    script = installed.python.with_name("qpatch")
    done = subprocess.run([str(script), "status", "--json"], capture_output=True, text=True, cwd=installed.folder)
    assert done.returncode == 0 and json.loads(done.stdout)["live"] is True


def test_without_site_the_doctor_still_runs_and_says_why_nothing_is_active(installed):
    # Under -S the package must be brought in by hand; then everything but site is there.
    options = {"flags": ("-S",), "env": {"PYTHONPATH": str(installed.site)}}
    done = qpatch(installed, "doctor", **options)
    assert done.returncode == 1 and done.stderr == ""
    found = checks(installed, **options)
    assert found["activation"]["verdict"] == "problem" and "-S" in found["activation"]["found"]
    assert found["installation"]["verdict"] == "ok"


def test_the_off_switch_is_seen_by_status_and_doctor(installed):
    assert finders(installed, env={"QPATCH": "0"}) == 0
    done = qpatch(installed, "status", "--json", env={"QPATCH": "0"})
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["live"] is False and "QPATCH=0" in report["explanation"]
    assert {hook["state"] for hook in report["hooks"]} == {"disabled"}


def test_a_target_install_is_inactive_says_so_and_enable_mends_it(empty, target):
    aside = {"PYTHONPATH": str(target)}
    assert finders(empty, env=aside) == 0
    found = checks(empty, env=aside)["activation"]
    assert found["verdict"] == "problem" and "--target" in found["found"] and found["todo"].endswith("-m qpatch enable")

    done = qpatch(empty, "enable", env=aside)
    assert done.returncode == 0 and str(empty.site / "qpatch.pth") in done.stdout
    # From now on PYTHONPATH is not needed, nor read.
    assert finders(empty, flags=("-I",)) == 1
    assert (empty.site / "qpatch.pth").read_text().splitlines() == [str(target), "import qpatch; qpatch.activate()"]
    assert checks(empty)["activation"]["verdict"] == "ok"

    again = qpatch(empty, "enable")
    assert again.returncode == 0 and again.stdout.count("was there already") == 2
    done = qpatch(empty, "disable")
    assert done.returncode == 0 and [path.name for path in empty.site.glob("qpatch*")] == []
    assert qpatch(empty, "disable", env=aside).stdout.startswith("there was no start-up file")


def test_enabling_a_copy_in_a_folder_outside_ascii_leaves_no_start_dead_in_another_locale(empty, target, tmp_path):
    aside = tmp_path / "gr\u00f6\u00dfer \u96ea"
    shutil.copytree(target, aside)
    assert qpatch(empty, "enable", env={"PYTHONPATH": str(aside), "PYTHONUTF8": "1"}).returncode == 0
    for locale in ({"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
        done = empty.run(FINDERS, env=locale)
        assert done.returncode == 0
    assert finders(empty, env={"PYTHONUTF8": "1"}) == 1
    assert checks(empty, env={"PYTHONUTF8": "1"})["leftovers"]["verdict"] == "ok"
    assert qpatch(empty, "disable", env={"PYTHONUTF8": "1"}).returncode == 0


def test_disable_and_enable_of_a_pip_install_leave_what_pip_left_and_uninstall_leaves_nothing(empty, wheel):
    (empty.site / "neighbour.txt").write_text("pip removes a site-packages folder that it has emptied\n")
    before = sorted(path.name for path in empty.site.iterdir())
    empty.install(wheel)
    first = {path.name: path.read_bytes() for path in empty.site.glob("qpatch.*")}
    done = qpatch(empty, "disable")
    assert done.returncode == 0 and "--force-reinstall" in done.stdout and "QPATCH=0" in done.stdout
    assert finders(empty) == 0
    assert "no qpatch.pth" in checks(empty)["activation"]["found"]
    assert qpatch(empty, "enable").returncode == 0
    assert {path.name: path.read_bytes() for path in empty.site.glob("qpatch.*")} == first
    assert finders(empty) == 1
    empty.uninstall("qpatch")
    assert sorted(path.name for path in empty.site.iterdir()) == before


def test_a_start_up_file_of_somebody_else_is_refused_in_one_line(fresh):
    (fresh.site / "qpatch.pth").write_text("import sys\n")
    for verb in ("enable", "disable"):
        done = qpatch(fresh, verb)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "did not write" in done.stderr
    assert (fresh.site / "qpatch.pth").read_text() == "import sys\n"


def test_a_copy_on_pythonpath_that_hides_the_installed_one_is_found(installed, target):
    found = checks(installed, env={"PYTHONPATH": str(target)})
    assert found["activation"]["verdict"] == "ok"
    assert found["installation"]["verdict"] == "ok" and found["copies"]["verdict"] == "warn"
    source = target.parent / "source"
    source.mkdir(exist_ok=True)
    if not (source / "qpatch").exists():
        (source / "qpatch").symlink_to(target / "qpatch")
    found = checks(installed, env={"PYTHONPATH": str(source)})
    assert found["installation"]["verdict"] == "problem" and str(source) in found["installation"]["found"]


def test_what_an_uninstall_by_hand_leaves_is_found_with_another_copy(empty, target):
    (empty.site / "qpatch").mkdir()
    (empty.site / "qpatch.pth").write_text("import qpatch; qpatch.activate()\n")
    found = checks(empty, env={"PYTHONPATH": str(target)})["leftovers"]
    assert found["verdict"] == "problem"
    assert str(empty.site / "qpatch.pth") in found["found"] and f"{empty.site / 'qpatch'} (a folder" in found["found"]


def test_a_user_install_is_live_but_not_under_minus_s(tmp_path, wheel):
    user = {"PYTHONUSERBASE": str(tmp_path / "user")}
    base = Path(sys.base_prefix) / ("python.exe" if sys.platform == "win32" else "bin/python3")
    code = "import site, sys; print(site.getusersitepackages() if site.ENABLE_USER_SITE else '')"
    place = subprocess.run([str(base), "-c", code], env=user, capture_output=True, text=True).stdout.strip()
    if not place:
        pytest.skip("this Python has no user site-packages")
    subprocess.run([sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", place,
                    str(wheel)], check=True)
    options = {"env": user, "cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([str(base), "-m", "qpatch", "doctor", "--json"], **options)
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert found["activation"]["verdict"] == "ok"
    assert found["user-site"]["verdict"] == "warn" and "-s" in found["user-site"]["found"]
    done = subprocess.run([str(base), "-s", "-m", "qpatch", "status"], **options)
    assert done.returncode == 1 and "No module named qpatch" in done.stderr


def test_a_copy_in_an_archive_is_said_to_be_one(empty, target, tmp_path):
    archive = shutil.make_archive(str(tmp_path / "application"), "zip", target)
    found = checks(empty, env={"PYTHONPATH": archive})
    assert found["installation"]["verdict"] == "note" and "archive" in found["installation"]["found"]
    assert found["activation"]["verdict"] == "problem" and archive in found["activation"]["found"]
