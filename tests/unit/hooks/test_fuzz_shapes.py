"""All hooks on targets of random shapes: never an error at import, and a state that tells the truth."""

import importlib
import inspect
import os
import random
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from qpatch import engine, states, toggles
from qpatch.catalogue import HOOKS

sys.path.insert(0, str(Path(__file__).parent))
import shapes

TARGETS = [(hook, target) for hook in HOOKS if not hook.internal for target in hook.targets]
REPAIRS = [(hook, target) for hook, target in TARGETS if hook.name.startswith("comfy-compat-")]
ROUNDS = int(os.environ.get("QPATCH_TEST_ROUNDS", "12"))


def vocabulary(target):
    """The names that the implementation looks for, as its text shows them: ``function`` and ``Class.method``."""
    text = inspect.getsource(importlib.import_module(target.implementation))
    named = set(re.findall(r"[\"']([A-Za-z_]\w*(?:\.\w+)?)[\"']", text)) | set(re.findall(r"\bmodule\.(\w+)", text))
    return sorted(named | set(target.defines))


def made(target, generator):
    """A module for ``target`` in which each name of the vocabulary has a random shape or is absent."""
    name = target.pattern.replace("*", "pack")
    module = ModuleType(name)
    words = vocabulary(target)
    methods = sorted({word.rpartition(".")[2] for word in words if "." in word or not word[0].isupper()})
    for word in words:
        top = word.partition(".")[0]
        if generator.random() < 0.85 or top in target.defines:
            vars(module)[top] = shapes.a_class(generator, methods) if top[0].isupper() else shapes.attribute(generator)
    return module


# A function may turn into a coroutine; a hook that tries it does not await.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """States of their own, every hook on, and errors kept inside as they are in a user's process."""
    monkeypatch.setattr(states, "_attempts", {})
    monkeypatch.setattr(toggles, "why_disabled", lambda hook: None)
    monkeypatch.setattr(toggles, "strict", lambda: False)


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.parametrize("hook, target", TARGETS, ids=[f"{hook.name} {target.pattern}" for hook, target in TARGETS])
def test_a_target_of_any_shape_is_imported_and_its_state_is_true(hook, target, seed):
    module = made(target, random.Random(f"{hook.name} {target.pattern} {seed}"))
    before = shapes.contents(module)
    engine._offer(hook, target, module.__name__, module)
    attempt = states.last(hook, target, module.__name__)
    if attempt is None:
        assert shapes.contents(module) == before
        return
    assert attempt.state in ("applied", "not-needed", "incompatible", "failed") and attempt.explanation
    assert (attempt.error is not None) is (attempt.state == "failed")
    if attempt.state == "applied":
        assert attempt.patches and not attempt.losses()
        for patch in reversed(attempt.patches):
            patch.revert()
    assert shapes.contents(module) == before, f"{attempt.state}: {attempt.explanation}"


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.parametrize("hook, target", REPAIRS, ids=[f"{hook.name} {target.pattern}" for hook, target in REPAIRS])
def test_a_repair_that_does_not_understand_its_target_says_incompatible_and_never_fails(hook, target, seed):
    module = made(target, random.Random(f"{hook.name} {target.pattern} {seed} again"))
    engine._offer(hook, target, module.__name__, module)
    attempt = states.last(hook, target, module.__name__)
    assert attempt is None or attempt.state != "failed", attempt.error
