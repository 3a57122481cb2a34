"""Every spelling of a key that is known to be written by somebody, and what it means."""

import re
from pathlib import Path

import pytest

from qpatch.lora import families
from qpatch.lora.keys import Role, Target, resolve

FIXTURES = [line.split(" => ") for line in Path(__file__).with_name("fixtures_keys.txt").read_text().splitlines()]


@pytest.mark.parametrize("key, meaning", FIXTURES)
def test_fixture_resolves_to_its_target_and_role(key, meaning):
    target, role = meaning.split(" | ")
    resolved = resolve(key)
    if target == "SKIP":
        assert (resolved.skipped, resolved.target) == (role, None)
    else:
        assert (str(resolved.target), resolved.role) == (target, Role(role))
        assert resolved.unknown is None and resolved.skipped is None
