"""What qpatch depends on: lower bounds for users, exact files by their hashes for those who test it."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pytest brings this one there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
DECLARED = [Requirement(text) for group in (PROJECT["dependencies"], *EXTRAS.values()) for text in group]


def locked():
    """Each entry of the lock: its requirement, and the hashes of the files that will do."""
    text = (ROOT / "requirements-dev.lock").read_text("utf-8")
    for entry in re.split(r"\n(?=[A-Za-z])", text.replace("\\\n", " ")):
        if not entry.startswith("#"):
            requirement, *hashes = re.split(r"\s+--hash=", entry.strip())
            yield Requirement(requirement), hashes


@pytest.mark.parametrize("requirement", DECLARED, ids=str)
def test_every_dependency_has_a_lower_bound_and_no_other(requirement):
    assert [clause.operator for clause in requirement.specifier] == [">="]
    assert requirement.url is None and requirement.marker is None


def test_the_lock_names_one_version_and_the_hashes_of_each_file():
    entries = list(locked())
    assert len(entries) > 20
    for requirement, hashes in entries:
        assert [clause.operator for clause in requirement.specifier] == ["=="], requirement
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", value) for value in hashes), requirement


@pytest.mark.parametrize("requirement", [one for one in DECLARED if one.name != "torch"], ids=str)
def test_the_lock_has_what_the_project_asks_for(requirement):
    versions = [next(iter(entry.specifier)).version for entry, _ in locked() if entry.name == requirement.name]
    assert versions and all(requirement.specifier.contains(version) for version in versions)


def test_the_lock_leaves_the_choice_of_torch_to_the_machine():
    assert not {entry.name for entry, _ in locked()} & {"torch", "triton"}
    assert not [entry.name for entry, _ in locked() if entry.name.startswith(("nvidia-", "cuda-"))]
