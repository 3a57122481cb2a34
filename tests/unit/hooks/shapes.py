"""Upstream shapes out of a random generator: what a name of a target may turn out to be one day."""

import functools
import types

NAMES = ["self", "x", "weight", "module", "patches", "key", "linear", "device_to"]
OPTIONAL = ["disabled", "key_map", "bias"]
BODIES = ["return None", "return 1", "raise KeyError('x')", "raise RuntimeError('no')", "return locals()", "yield 1"]


def _function(random):
    """A Python function of a random signature that returns, raises, or calls what it is given."""
    names = random.sample(NAMES, random.randint(0, 4))
    chosen = random.sample(OPTIONAL, random.randint(0, 2))
    optional = [f"{name}={random.choice(['None', '{}', '0'])}" for name in chosen]
    bulk = random.sample(["*args", "**kwargs"], random.randint(0, 2))
    bulk.sort(key=len)
    body = random.choice(BODIES)
    keyword = random.choice(["def", "def", "def", "async def"])
    scope = {}
    exec(f"{keyword} made({', '.join([*names, *optional, *bulk])}):\n    {body}", scope)
    return scope["made"]


def _wrapped(random):
    inner = _function(random)
    outer = functools.wraps(inner)(lambda *args, **kwargs: inner(*args, **kwargs))
    return outer if random.random() < 0.5 else (lambda *args, **kwargs: inner(*args, **kwargs))


class _Callable:
    __slots__ = ()

    def __call__(self, *args, **kwargs):
        return None


class _Hostile:
    """Answers yes to every name, as torch.ops does, and raises where it is called."""

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **kwargs):
        raise SystemError("called")


def attribute(random):
    """Something that a function's name may hold."""
    make = random.choice([
        *[lambda: _function(random)] * 3, lambda: _wrapped(random), lambda: len,
        lambda: dict.update, lambda: functools.partial(_function(random)), lambda: staticmethod(_function(random)),
        lambda: classmethod(_function(random)), lambda: property(_function(random)),
        _Callable, _Hostile, lambda: None, lambda: 5,
    ])
    return make()


def a_class(random, methods):
    """A class with some of ``methods``, each of any shape; sometimes slotted, derived, or not a class at all."""
    if random.random() < 0.15:
        return attribute(random)
    body = {name: attribute(random) for name in methods if random.random() < 0.8}
    if random.random() < 0.2:
        body["__slots__"] = ("weight",)
    bases = random.choice([(), (), (types.SimpleNamespace,), (dict,)])
    if "__slots__" in body and bases == (types.SimpleNamespace,):
        bases = ()
    body = {name: value for name, value in body.items() if callable(value) or name == "__slots__" or name[:2] != "__"}
    try:
        return type("Made", bases, body)
    except (TypeError, ValueError):
        return type("Made", (), {})


def contents(module):
    """What a patch could change: the module's names and the names of its classes, by identity."""
    found = {}
    for name, value in vars(module).items():
        if name == "__warningregistry__":  # Python's own, made when code of the module warns
            continue
        found[name] = id(value)
        if isinstance(value, type) and value.__flags__ & (1 << 9):
            found.update({f"{name}.{key}": id(inner) for key, inner in vars(value).items()})
    return found
