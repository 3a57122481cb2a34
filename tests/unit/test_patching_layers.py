"""Several hooks on one function: each wraps it once, and each answers for itself."""

import types

from qpatch.patching import Wrap, put


def _add(number):
    return lambda original: lambda value: original(value) + number


def _module():
    module = types.ModuleType("target")
    module.f = lambda value: value
    return module


def _wrap(module, hook, number):
    patch = Wrap(module, "f", _add(number))
    patch.by = hook
    return patch


def test_two_hooks_may_wrap_the_same_function():
    module = _module()
    put([_wrap(module, "first", 1), _wrap(module, "second", 10)])
    assert module.f(100) == 111


def test_a_hook_that_comes_again_does_not_wrap_twice_even_under_another_hook_s_layer():
    module = _module()
    put([_wrap(module, "first", 1), _wrap(module, "second", 10)])
    put([_wrap(module, "first", 1)])
    assert module.f(100) == 111


def test_one_hook_s_patch_can_be_lost_while_the_other_s_stands():
    module = _module()
    first, second = _wrap(module, "first", 1), _wrap(module, "second", 10)
    put([first, second])
    module.f = first.put
    assert first.lost() is None
    assert "is now" in second.lost()
