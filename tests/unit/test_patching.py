"""Patches: put in place together or not at all, taken back exactly, honest about who stands there."""

import copy
import functools
import inspect
import pickle
import sys
import types

import pytest

from qpatch.patching import MARK, Patch, Supply, Wrap, dress, marked, put, take_back


def plus_one(original):
    def replacement(*arguments, **named):
        return original(*arguments, **named) + 1
    return replacement


@pytest.fixture
def module(request):
    made = types.ModuleType(f"patched_{request.node.name.partition('[')[0]}")
    exec("""if True:
        def f(x, *, y=0):
            "What f does."
            return x + y
        class Base:
            def method(self, x): return x
            @classmethod
            def of_class(cls, x): return x, cls
            @staticmethod
            def static(x): return x
        class Child(Base): pass
        class Slots:
            __slots__ = ("a",)
            def method(self, x): return x
    """, made.__dict__)
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def test_a_wrapped_function_keeps_its_name_and_signature_and_can_be_pickled_and_copied(module):
    original = module.f
    put([Wrap(module, "f", plus_one)])
    assert (module.f(1), module.f(1, y=2)) == (2, 4)
    assert (module.f.__name__, module.f.__doc__, module.f.__module__) == ("f", "What f does.", module.__name__)
    assert inspect.signature(module.f) == inspect.signature(original)
    assert pickle.loads(pickle.dumps(module.f)) is module.f
    assert copy.deepcopy(module.f) is module.f


def test_attributes_that_others_put_on_the_original_are_not_copied(module):
    module.f.get_compiler_config = lambda: None
    put([Wrap(module, "f", plus_one)])
    assert set(vars(module.f)) == {"__wrapped__", MARK}


@pytest.mark.parametrize("owner", ["Base", "Child", "Slots"])
def test_a_method_is_wrapped_on_the_class_that_was_named(module, owner):
    cls = getattr(module, owner)
    put([Wrap(cls, "method", plus_one)])
    assert cls().method(1) == 2
    assert module.Base().method(1) == (2 if owner == "Base" else 1)


@pytest.mark.parametrize("name, kind", [("of_class", classmethod), ("static", staticmethod)])
def test_class_methods_and_static_methods_keep_their_kind_and_are_put_back_as_the_same_objects(module, name, kind):
    before = vars(module.Base)[name]
    patch = Wrap(module.Base, name, lambda original: lambda *arguments: ("ours", original(*arguments)))
    put([patch])
    assert isinstance(vars(module.Base)[name], kind)
    assert module.Child().static(1) == (("ours", 1) if name == "static" else 1)
    assert module.Child.of_class(1) == (("ours", (1, module.Child)) if name == "of_class" else (1, module.Child))
    take_back([patch])
    assert vars(module.Base)[name] is before


def test_an_inherited_method_is_put_back_by_taking_ours_away(module):
    patch = Wrap(module.Child, "method", plus_one)
    put([patch])
    assert "method" in vars(module.Child)
    take_back([patch])
    assert "method" not in vars(module.Child)


def test_a_patch_that_fails_takes_the_others_back(module):
    before = dict(vars(module))
    missing = Wrap(module, "g", plus_one)
    with pytest.raises(AttributeError, match=r"patched_.*\.g does not exist"):
        put([Wrap(module, "f", plus_one), Supply(module, "h", 1), missing])
    assert dict(vars(module)) == before


def test_an_interrupt_in_the_middle_of_a_patch_takes_it_back_too(module):
    class Interrupted(Wrap):
        def apply(self):
            super().apply()
            raise KeyboardInterrupt

    before = module.f
    with pytest.raises(KeyboardInterrupt):
        put([Interrupted(module, "f", plus_one)])
    assert module.f is before


def test_a_patch_that_cannot_be_taken_back_does_not_keep_the_others(module):
    class Stuck(Patch):
        def apply(self):
            pass

        def revert(self):
            raise ValueError("stuck")

    patches = [Wrap(module, "f", plus_one), Stuck()]
    put(patches)
    with pytest.raises(ValueError, match="stuck"):
        take_back(patches)
    assert module.f(1) == 1


@pytest.mark.parametrize("owner, name", [(int, "bit_length"), (types.FunctionType, "__call__")])
def test_a_built_in_class_refuses_and_nothing_has_changed(owner, name):
    patch = Wrap(owner, name, plus_one)
    with pytest.raises(TypeError):
        put([patch])
    patch.revert()


def test_what_somebody_put_on_top_is_not_taken_away_with_ours(module):
    patch = Wrap(module, "f", plus_one)
    put([patch])
    module.f = on_top = functools.wraps(module.f)(lambda x, inner=module.f: inner(x) * 10)
    take_back([patch])
    assert module.f is on_top
    assert patch.lost() is None and "test_patching" in patch.in_front()


def test_our_patch_is_seen_through_a_closure_around_a_proxy(module):
    wrapt = pytest.importorskip("wrapt")
    patch = Wrap(module, "f", plus_one)
    put([patch])
    proxy = wrapt.FunctionWrapper(module.f, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))
    module.f = lambda x: proxy(x) * 10
    assert module.f(1) == 20
    assert patch.lost() is None and "test_patching" in patch.in_front()


def test_a_function_that_merely_lives_beside_ours_does_not_count_as_calling_it(module):
    module.helper = module.f
    patches = [Wrap(module, "f", plus_one)]
    put(patches)
    exec("def user(x): return f(x)\ndef replacement(x): return user(x)", module.__dict__)
    module.f = module.replacement
    assert patches[0].lost().endswith(f"is now {module.__name__}.replacement")


def test_a_function_that_is_gone_is_lost(module):
    patches = [Wrap(module, "f", plus_one), Supply(module, "g", plus_one)]
    put(patches)
    del module.f, module.g
    assert [patch.lost() for patch in patches] == [f"{module.__name__}.f is gone", f"{module.__name__}.g is gone"]


def test_what_exists_is_not_supplied_again_and_not_taken_away(module):
    real = module.f
    patch = Supply(module, "f", plus_one)
    put([patch])
    take_back([patch])
    assert module.f is real and patch.lost() is None


def test_what_was_supplied_before_is_not_taken_away_by_a_later_attempt_that_fails(module):
    def value():
        return 1

    put([Supply(module, "g", value)])
    with pytest.raises(AttributeError):
        put([Supply(module, "g", value), Wrap(module, "missing", plus_one)])
    assert module.g is value


def test_a_patch_that_found_itself_in_place_still_knows_when_it_is_lost(module):
    original = module.f
    put([Wrap(module, "f", plus_one)])
    again = Wrap(module, "f", plus_one)
    put([again])
    assert again.lost() is None
    module.f = original
    assert again.lost().endswith(f"is now {module.__name__}.f")


def test_what_was_supplied_is_marked_and_taken_away_again(module):
    patch = Supply(module, "g", lambda: 1)
    put([patch])
    assert module.g() == 1 and marked(module.g)
    take_back([patch])
    assert not hasattr(module, "g")


def test_a_proxy_that_answers_everything_ends_the_search(module):
    class Endless:
        @property
        def __wrapped__(self):
            return Endless()

    patch = Wrap(module, "f", plus_one)
    put([patch])
    module.f = Endless()
    assert "Endless" in patch.lost()


def test_torch_compiles_a_dressed_function_and_method_in_one_graph(module):
    torch = pytest.importorskip("torch")

    def layer(x):
        return x * 2

    dressed = dress(lambda x: layer(x) + 1, layer)
    with torch.no_grad():
        explained = torch._dynamo.explain(dressed)(torch.ones(3))
        assert (explained.graph_count, explained.graph_break_count) == (1, 0)
        compiled = torch.compile(dressed, backend="eager", fullgraph=True)
        assert compiled(torch.ones(3)).tolist() == [3.0, 3.0, 3.0]
        torch_module = type("Layer", (torch.nn.Linear,), {})
        put([Wrap(torch_module, "forward", lambda o: lambda self, x: o(self, x) + 1)])
        model = torch_module(3, 3)
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(torch.ones(3)), model(torch.ones(3)))
