"""``import torch`` that costs nothing until torch is used: a listing of a file's header needs none of it.

Only for the process of a command; a library must not put such a thing into ``sys.modules``.
"""

import importlib
import importlib.util
import sys
from types import ModuleType


class OnDemand(ModuleType):
    """Stands in ``sys.modules`` for a module until somebody asks it for an attribute; passes on to the real one.

    importlib's LazyLoader does not do here: the import statement looks at ``__spec__`` of what it finds, and
    that loads it.
    """

    def __getattr__(self, attribute):
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), attribute)


def import_on_demand(name: str) -> None:
    """Let ``import name`` give an :class:`OnDemand`, unless the module is loaded already or not installed."""
    if name in sys.modules or importlib.util.find_spec(name) is None:
        return
    stand_in = OnDemand(name)
    stand_in.__spec__ = importlib.util.find_spec(name)
    sys.modules[name] = stand_in
