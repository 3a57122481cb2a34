"""Reading versions, requirements and files of packages from disk."""

import itertools

import pytest
from packaging.specifiers import SpecifierSet

from qpatch.doctor import packages

VERSIONS = ["0.2", "0.2.7", "0.2.10", "0.2.31", "0.3", "1.0.0", "1.2.1", "2.0"]
REQUIREMENTS = ["==0.2.31", ">=0.2.7", ">0.2.10", "<1", "<=1.0", "!=0.3", "~=0.2.7", "~=0.2", ">=0.2.7,<0.3", ""]


@pytest.mark.parametrize(("version", "requirement"), list(itertools.product(VERSIONS, REQUIREMENTS)))
def test_requirements_are_judged_as_packaging_judges_them(version, requirement):
    assert packages.satisfies(version, requirement) == SpecifierSet(requirement).contains(version)


@pytest.mark.parametrize(("text", "numbers"), [
    ("2.10.0+cu130", (2, 10, 0)), ("1.3.0.dev20260213", (1, 3, 0)), ("1.2.1+cu13.0torch2.10", (1, 2, 1)), ("x", ()),
])
def test_the_release_of_a_version_is_its_leading_numbers(text, numbers):
    assert packages.release(text) == numbers


@pytest.mark.parametrize(("line", "expected"), [
    ("diffusers>=0.36", ">=0.36"), ("Diffusers (>=0.36,<1)", ">=0.36,<1"), ("diffusers", ""),
    ("diffusers[torch] >= 0.36 ; python_version > '3'", ">= 0.36"), ("diffusers-extra>=1", None),
    ("diffusers>=9; extra == 'dev'", None), ("# diffusers>=0.36", None),
])
def test_what_a_list_of_requirements_asks_of_one_distribution(line, expected):
    assert packages.requirement(["torch", line], "diffusers") == expected


def test_name_and_version_come_from_the_project_table_only(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[tool.other]\nname = "wrong"\nversion = "9"\n\n[project]\nname = "ComfyUI-nunchaku"\n'
        'version = "1.2.1"\ndescription = """x"""\n\n[project.urls]\nname = "wrong too"\n')
    assert packages.project(tmp_path / "pyproject.toml") == {"name": "ComfyUI-nunchaku", "version": "1.2.1"}
    assert packages.project(tmp_path / "absent.toml") == {}


def test_a_package_is_found_on_the_made_up_path_and_nowhere_else(machine):
    machine.torch("2.10.0")
    context = machine.context()
    assert packages.folder("torch", context) == machine.site / "torch"
    assert packages.folder("pytest", context) is None
    assert packages.version("pytest", context) is None


def test_metadata_left_without_a_name_counts_as_not_installed(machine):
    machine.write("site-packages/nunchaku-1.2.1.dist-info/RECORD", "")
    assert packages.version("nunchaku", machine.context()) is None


@pytest.mark.parametrize(("file", "module"), [
    ("nunchaku/models/linear.py", "nunchaku.models.linear"), ("nunchaku/models/__init__.py", "nunchaku.models"),
    ("nunchaku/_C.cpython-312-x86_64-linux-gnu.so", "nunchaku._C"), ("nunchaku/_C.cp312-win_amd64.pyd", "nunchaku._C"),
])
def test_the_file_of_a_module_is_found_without_importing_its_package(tmp_path, file, module):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text("raise SystemExit('imported')\n")
    assert packages.module_file(tmp_path / "nunchaku", module) == path
    assert packages.module_file(tmp_path / "nunchaku", "nunchaku.absent") is None
