"""``other_packs``: after each node pack that ComfyUI loads, lost patches are looked at again."""

import asyncio
import sys
import textwrap
from types import ModuleType

import pytest

from qpatch import engine, states
from qpatch.catalogue import Hook, Target
from qpatch.finding import needed, not_needed
from qpatch.patching import Wrap


def _nodes(source):
    module = ModuleType("nodes")
    exec(textwrap.dedent(source), module.__dict__)
    return module


@pytest.fixture
def looks(monkeypatch):
    counted = []
    monkeypatch.setattr(engine, "renew", lambda: counted.append(1))
    return counted


def test_it_looks_again_after_a_pack_that_is_loaded_asynchronously(mend, looks):
    nodes = _nodes("async def load_custom_node(path, ignore=()):\n    return path, ignore")
    assert mend("other_packs", nodes).verdict == "needed"
    assert asyncio.run(nodes.load_custom_node("pack", ignore={1})) == ("pack", {1})
    assert looks == [1]


def test_it_looks_again_also_when_the_pack_fails(mend, looks):
    nodes = _nodes("def load_custom_node(path):\n    raise ImportError(path)")
    mend("other_packs", nodes)
    with pytest.raises(ImportError, match="pack"):
        nodes.load_custom_node("pack")
    assert looks == [1]


def test_a_module_of_that_name_of_another_program_is_left_alone(mend):
    assert mend("other_packs", _nodes("class Node: pass")).verdict == "not-needed"


class Doubling:
    """A hook implementation: the target's ``f`` must double its argument."""

    @staticmethod
    def examine(module):
        return needed("f does not double") if module.f(2) != 4 else not_needed("f doubles")

    @staticmethod
    def patches(module):
        return [Wrap(module, "f", lambda original: lambda value: 2 * original(value))]


@pytest.fixture
def target(monkeypatch):
    """A module whose ``f`` a hook has patched, and the hook's state."""
    module = ModuleType("target")
    exec("def f(value): return value", module.__dict__)
    hook = Hook("test-doubling", "f", (Target("target", "doubling"),))
    monkeypatch.setattr(states, "_attempts", {})
    monkeypatch.setitem(sys.modules, "doubling", Doubling)
    engine._offer(hook, hook.targets[0], "target", module)
    return module, lambda: states.last(hook, hook.targets[0], "target")


def test_a_replacement_that_has_the_fault_is_wrapped_and_named(target):
    module, state = target
    assert module.f(3) == 6
    exec("def theirs(value): return value + 1", pack := {"__name__": "pack"})
    module.f = pack["theirs"]
    assert state().state == "lost"
    engine.renew()
    assert (state().state, module.f(3)) == ("applied", 8)
    assert "put around what had replaced it: target.f is now pack.theirs" in state().explanation


def test_a_replacement_without_the_fault_is_left_alone(target):
    module, state = target
    module.f = theirs = lambda value: 2 * value
    engine.renew()
    assert module.f is theirs and state().state == "not-needed"


def test_nothing_happens_while_nothing_is_lost(target):
    module, state = target
    before = module.f, state()
    engine.renew()
    assert (module.f, state()) == before
