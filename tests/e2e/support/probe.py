"""Loaded by child processes of the tests: hooks on stand-in targets, before the engine reads the catalogue."""

import sys

from qpatch import catalogue, finder, finding
from qpatch.patching import Wrap


def watch(*patterns, name="probe", implementation="probe", defines=("f",), default=True):
    """Register a hook on ``patterns``; it wraps ``f`` of the target so that 1 is added to what it returns."""
    assert "qpatch.engine" not in sys.modules, "the engine has read the catalogue already"
    targets = tuple(catalogue.Target(pattern, implementation, defines) for pattern in patterns)
    catalogue.HOOKS += (catalogue.Hook(name, "a stand-in", targets, default),)
    finder.TARGETS.update(catalogue.patterns())


def examine(module):
    return finding.needed("f is one too small")


def patches(module):
    return [Wrap(module, "f", lambda original: lambda *arguments: original(*arguments) + 1)]


def states(name="probe"):
    """The states of that hook's attempts, by module name."""
    from qpatch import states

    return {attempt.module_name: attempt.state for attempt in states.attempts(catalogue.named(name))}


def finders():
    """How many finders of qpatch stand on sys.meta_path."""
    return sum(finder.is_ours(other) is not None for other in sys.meta_path)
