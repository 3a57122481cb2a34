"""Modules in ``sys.modules`` seen from outside: which are targets, and how far they have come.

Nothing here asks a module for an attribute. Things in ``sys.modules`` may be anything, and a lazy
module runs its body when it is asked.
"""

import sys

from .catalogue import HOOKS
from .finder import is_target, matches


def wanting(name: str):
    """Each (hook, target) whose pattern fits the module name ``name``."""
    return [(hook, target) for hook in HOOKS for target in hook.targets if matches(name, (target.pattern,))]


def in_sys_modules():
    """Each (name, module) of ``sys.modules`` whose name is that of a target."""
    return [(name, module) for name, module in list(sys.modules.items()) if module is not None and is_target(name)]


def contents(module) -> dict:
    """The namespace of ``module`` as it lies there; empty for an object that has none."""
    try:
        return object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}


def missing(target, module) -> list[str]:
    """The names that ``target`` must define and ``module`` does not."""
    return [name for name in target.defines if name not in contents(module)]


def running(module) -> bool:
    """Whether the body of ``module`` is running at this moment."""
    return contents(contents(module).get("__spec__")).get("_initializing") is True


def asleep(module) -> bool:
    """Whether ``module`` is an importlib.util.LazyLoader module whose body has not been asked for."""
    return type(module).__module__ == "importlib.util" and type(module).__name__ == "_LazyModule"


def loader_of(module) -> str:
    """What loaded ``module``, for people."""
    loader = contents(contents(module).get("__spec__")).get("loader") or contents(module).get("__loader__")
    kind = loader if isinstance(loader, type) else type(loader)
    return "no loader" if loader is None else kind.__name__
