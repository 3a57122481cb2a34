"""What the distribution holds, what installing it changes, and that removing it leaves nothing."""

import base64
import csv
import hashlib
import importlib.util
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUPPORTED = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: The import line of each release: a start-up file can outlive the release that wrote it.
PTH_OF_ALL_RELEASES = ("import qpatch; qpatch.activate()\n",)


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sources():
    """Name in the wheel -> file here, for each file of the package."""
    files = [*(ROOT / "qpatch").rglob("*"), *(ROOT / "hooks").rglob("*"), *(ROOT / "lora").rglob("*")]
    files = [path for path in files if path.is_file() and "__pycache__" not in path.parts]
    names = {path: path.relative_to(ROOT).as_posix() for path in files}
    return {name if name.startswith("qpatch/") else f"qpatch/{name}": path for path, name in names.items()}


def metadata(wheel):
    (text,) = [data for name, data in contents(wheel).items() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(text.decode())


def test_the_wheel_holds_the_package_and_the_start_up_files_and_nothing_else(wheel):
    held = contents(wheel)
    info = f"qpatch-{metadata(wheel)['Version']}.dist-info/"
    files = {name for name in held if not name.startswith(info)}
    assert files == {*sources(), "qpatch.pth", "qpatch.start"}
    assert {name.removeprefix(info) for name in held if name.startswith(info)} == {
        "METADATA", "WHEEL", "RECORD", "top_level.txt", "entry_points.txt", "licenses/LICENSE"}
    for name, path in {**sources(), "qpatch.pth": ROOT / "qpatch.pth", "qpatch.start": ROOT / "qpatch.start"}.items():
        assert held[name] == path.read_bytes(), name


def test_each_source_folder_is_a_package(wheel):
    folders = {name.rpartition("/")[0] for name in sources()}
    assert {f"{folder}/__init__.py" for folder in folders} <= set(sources())


def test_the_record_lists_each_file_with_its_hash(wheel):
    held = contents(wheel)
    (record,) = [name for name in held if name.endswith("/RECORD")]
    listed = {row[0]: row[1:] for row in csv.reader(held[record].decode().splitlines())}
    assert set(listed) == set(held)
    for name, (digest, size) in listed.items():
        if name != record:
            encoded = base64.urlsafe_b64encode(hashlib.sha256(held[name]).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={encoded}", len(held[name])), name


def test_the_start_up_files_are_one_plain_line_each(wheel):
    pth, start = contents(wheel)["qpatch.pth"], contents(wheel)["qpatch.start"]
    assert pth.decode("ascii") == PTH_OF_ALL_RELEASES[-1]
    assert start == b"qpatch:activate\n"
    assert not re.search(rb"exec|eval|base64|compile|\\x|__import__", pth + start)


def test_the_start_up_files_of_all_releases_call_this_one(each_python):
    for text in PTH_OF_ALL_RELEASES:
        # No name of site's own is in reach of the line.
        each_python.run(f"exec({text!r}, {{}}, {{}}); from qpatch import states; assert states.live()")
    each_python.run("import pkgutil; assert callable(pkgutil.resolve_name('qpatch:activate'))")


def test_a_start_file_and_a_pth_file_may_both_run(each_python):
    each_python.run(f"""if True:
        import pkgutil, sys
        exec({PTH_OF_ALL_RELEASES[-1]!r}, {{}}, {{}})
        pkgutil.resolve_name("qpatch:activate")()
        assert sum(type(f).__module__ == "qpatch.finder" for f in sys.meta_path) == 1
    """)


def test_requirements_have_lower_bounds_only_and_nunchaku_is_none_of_them(wheel):
    required = [line for line in metadata(wheel).get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(line.partition(">=")[0] for line in required) == ["importlib-metadata", "safetensors", "torch"]
    assert all(re.fullmatch(r"[a-z-]+>=[0-9.]+", line) for line in required)
    assert metadata(wheel)["Requires-Python"] == ">=3.10"
    assert metadata(wheel)["License-Expression"] == "Apache-2.0"


def test_the_version_is_the_one_that_the_package_tells(each_python, wheel):
    assert each_python.run("import qpatch; print(qpatch.__version__)").stdout.strip() == metadata(wheel)["Version"]
    assert each_python.command("-m", "qpatch", "--version").stdout.split()[-1] == metadata(wheel)["Version"]


def test_each_module_of_the_wheel_can_be_imported_and_none_brings_a_target(installed_with_torch):
    files = [name.removesuffix(".py") for name in sources() if name.endswith(".py")]
    names = [name.removesuffix("/__init__").replace("/", ".") for name in files]
    installed_with_torch.run(f"""if True:
        import importlib, sys
        for name in {sorted(names)!r}:
            if not name.endswith("__main__"):
                importlib.import_module(name)
        upstream = sorted(n for n in sys.modules if n.partition(".")[0] in ("nunchaku", "comfy", "comfyui_nunchaku"))
        assert not upstream, upstream
    """)


def digests(folder):
    files = [path for path in Path(folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("used", [False, True], ids=["at once", "after use"])
def test_uninstalling_leaves_the_environment_as_it_was(empty, wheel, used, bench):
    (empty.site / "somebody.pth").write_text("import sys\n")
    (empty.site / "somebody").mkdir()
    (empty.site / "somebody" / "__init__.py").write_text("import json\n")
    before = digests(empty.folder)
    empty.install(wheel)
    added = set(digests(empty.folder)) - set(before)
    site = empty.site.relative_to(empty.folder).as_posix()
    top = {name.removeprefix(site + "/").partition("/")[0] for name in added if name.startswith(site)}
    assert top == {"qpatch", "qpatch.pth", "qpatch.start", f"qpatch-{metadata(wheel)['Version']}.dist-info"}
    if used:
        bench.write(**{"nunchaku.models.linear": "class SVDQW4A4Linear: pass"})
        bench.run(empty, "import nunchaku.models.linear; from qpatch import states; "
                         "states.snapshot(); assert states.live()")
    empty.uninstall("qpatch")
    assert digests(empty.folder) == before
    assert not (empty.site / "qpatch").exists()


def test_a_source_distribution_builds_the_same_wheel(wheel, build_wheel, copy_of_the_source, tmp_path):
    source = copy_of_the_source(tmp_path / "source")
    command = [sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
        packed.extractall(tmp_path / "unpacked", filter="data")
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "qpatch.pth", "qpatch.start"} <= names
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert contents(build_wheel(unpacked, tmp_path / "out")) == contents(wheel)


def test_two_builds_with_the_same_date_are_the_same_bytes(build_wheel, copy_of_the_source, tmp_path):
    dated = {"SOURCE_DATE_EPOCH": "1700000000"}
    first, second = (
        build_wheel(copy_of_the_source(tmp_path / name), tmp_path / f"{name}-out", dated).read_bytes()
        for name in ("one", "two")
    )
    assert first == second


def test_a_second_build_in_the_same_folder_holds_nothing_of_the_first(wheel, build_wheel, copy_of_the_source, tmp_path):
    source = copy_of_the_source(tmp_path / "source")
    (source / "hooks" / "gone_since.py").write_text("")
    assert "qpatch/hooks/gone_since.py" in contents(build_wheel(source, tmp_path / "first"))
    (source / "hooks" / "gone_since.py").unlink()
    assert contents(build_wheel(source, tmp_path / "second")) == contents(wheel)


@pytest.mark.parametrize("version", SUPPORTED)
def test_the_engine_is_tested_on_this_python(version, interpreters):
    if version not in interpreters:
        pytest.skip(f"no Python {version} on this machine (looked on PATH, among pyenv's and in QPATCH_TEST_PYTHONS)")
    told = subprocess.run([interpreters[version], "--version"], capture_output=True, text=True, check=True)
    assert f"Python {version}." in told.stdout


def test_an_editable_install_activates_has_all_packages_and_goes_without_a_trace(empty, tmp_path, copy_of_the_source):
    source = copy_of_the_source(tmp_path / "source")
    tools = tmp_path / "tools"
    tools.mkdir()
    # pip builds with what the environment sees; of the tests' own it is to see setuptools and no more.
    beside = Path(importlib.util.find_spec("setuptools").origin).parents[1]
    for path in [*beside.glob("setuptools*"), beside / "_distutils_hack"]:
        (tools / path.name).symlink_to(path)
    (empty.site / "tools.pth").write_text(f"{tools}\n")
    before = digests(empty.site)
    empty.install("--no-build-isolation", "--editable", source)
    empty.run(f"""if True:
        import importlib.util, sys
        assert sum(type(f).__module__ == "qpatch.finder" for f in sys.meta_path) == 1
        import qpatch, qpatch.hooks
        from qpatch import states
        assert states.live()
        for name in ("qpatch", "qpatch.hooks", "qpatch.lora"):
            assert importlib.util.find_spec(name).origin.startswith({str(source)!r}), name
        for name in ("hooks", "lora", "tests"):
            assert importlib.util.find_spec(name) is None, name
    """)
    empty.uninstall("qpatch")
    assert digests(empty.site) == before
    assert empty.run("pass").stderr == ""
