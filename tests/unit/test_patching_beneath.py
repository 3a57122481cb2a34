"""Whose function a patch calls through to."""

import types

from qpatch.patching import Wrap, put


def _module(name, source):
    module = types.ModuleType(name)
    exec(source, module.__dict__)
    return module


def _wrap(owner, name):
    patch = Wrap(owner, name, lambda original: lambda *args: original(*args))
    patch.by = "hook"
    put([patch])
    return patch


def test_a_patch_around_the_target_s_own_function_names_nobody():
    target = _module("target", "def f(): pass\nclass C:\n    def g(self): pass\nclass D(C): pass")
    assert _wrap(target, "f").beneath() is None
    assert _wrap(target.D, "g").beneath() is None
    assert _wrap(target.C, "g").beneath() is None


def test_a_patch_around_another_pack_s_replacement_names_the_pack():
    target, other = _module("target", "def f(): pass"), _module("other", "def theirs(): pass")
    target.f = other.theirs
    assert _wrap(target, "f").beneath() == "target.f calls through to other.theirs"


def test_a_patch_that_was_not_put_names_nobody():
    assert Wrap(_module("target", "def f(): pass"), "f", None).beneath() is None
