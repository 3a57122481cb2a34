"""LoRA files that are nearly right: 2,000 of them, the same each time. nightly.py runs more."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from fuzz.cases import cases
from fuzz.harness import Harness


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    return Harness(tmp_path_factory.mktemp("fuzz"))


@settings(max_examples=2000, deadline=None, derandomize=True, database=None, phases=[Phase.generate, Phase.shrink],
          suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_a_file_is_applied_or_refused_by_name_and_leaves_the_model_as_it_was(harness, case):
    harness.check(case)


def test_the_files_that_are_tried_are_of_many_sorts(harness):
    """Else the test before this one means little."""
    assert sum(harness.seen.values()) >= 2000
    assert {"applied", "FileError", "ShapeError", "NonFiniteError", "UnknownFamily",
            "UnsupportedAdapter"} <= set(harness.seen)
    assert harness.seen["applied"] > 300
