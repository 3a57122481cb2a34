"""Small repairs of calls that broke between releases: one file each, probed, switched by its own toggle.

A repair is an entry in ``qpatch/repairs.py`` (name, what it mends, target, the versions where the
break was seen) and a file here that says how to see the break and how to mend it. A whole one::

    from . import Repair, Spot, accepts

    def _lacks(original, module):
        return None if accepts(original, "speed") else "ComfyUI passes speed=, which it does not know"

    def _mend(original, module):
        def run(self, *args, speed=None, **kwargs):
            return original(self, *args, **kwargs)
        return run

    REPAIR = Repair(Spot("Runner.run", _lacks, _mend), fine="it knows speed=")
    examine, patches = REPAIR.examine, REPAIR.patches

``examine`` answers ``incompatible`` for whatever the probe cannot make sense of: a function that is
gone, one that is not written in Python, a probe that stops. Nothing is stubbed.
"""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType

from qpatch.finding import Finding, incompatible, needed, not_needed
from qpatch.layers import layers
from qpatch.patching import Patch, Wrap

#: (the function as it stands, its module) -> why it is broken here, in plain words; None if it is not.
Probe = Callable[[FunctionType, ModuleType], "str | None"]
#: (the function as it stands, its module) -> its replacement, which calls the original.
Mend = Callable[[FunctionType, ModuleType], FunctionType]


@dataclass(frozen=True)
class Spot:
    """One function to mend.

    ``path``    its place in the module: ``function`` or ``Class.method``.
    ``absent``  why all is well where there is no such function, in words or as a function of the module
                that gives them; None: then the target is not understood.
    """

    path: str
    broken: Probe
    mend: Mend
    absent: "str | Callable[[ModuleType], str | None] | None" = None

    def owner(self, module: ModuleType):
        """The module or class that holds the function; None if there is no such class."""
        cls, _, _ = self.path.rpartition(".")
        owner = vars(module).get(cls) if cls else module
        return owner if owner is module or isinstance(owner, type) else None

    def original(self, module: ModuleType):
        """The function as it stands, also where a base class defines it; None if there is none."""
        owner, name = self.owner(module), self.path.rpartition(".")[2]
        for place in getattr(owner, "__mro__", (owner,)):
            if place is not None and name in vars(place):
                found = vars(place)[name]
                return found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
        return None

    def patch(self, module: ModuleType) -> Patch:
        return Wrap(self.owner(module), self.path.rpartition(".")[2], lambda original: self.mend(original, module))


class Repair:
    """Spots that are mended together; makes the two functions that the engine asks a hook module for.

    ``spots``  Spot objects, or one function that lists them for a module.
    ``fine``   what is said where no spot is broken.
    """

    def __init__(self, *spots, fine: str):
        self._spots, self.fine = spots, fine

    def spots(self, module: ModuleType) -> list[Spot]:
        found = []
        for spot in self._spots:
            found += [spot] if isinstance(spot, Spot) else spot(module)
        return found

    def _judge(self, spot: Spot, module: ModuleType) -> Finding:
        original = spot.original(module)
        if original is None:
            fine = spot.absent(module) if callable(spot.absent) else spot.absent
            return not_needed(fine) if fine else incompatible(f"there is no {spot.path}")
        if not isinstance(original, FunctionType):
            return incompatible(f"{spot.path} is a {type(original).__name__}, not a Python function")
        try:
            with warnings.catch_warnings():
                # What upstream warns of in a probe is no news of the user's model.
                warnings.simplefilter("ignore")
                reason = spot.broken(original, module)
            if reason:
                # Made for trial: a mend that cannot be made here is found out before anything is changed.
                spot.mend(original, module)
        except Exception as error:
            return incompatible(f"the probe of {spot.path} stopped: {type(error).__name__}: {error}")
        return needed(reason) if reason else not_needed(self.fine)

    def examine(self, module: ModuleType) -> Finding:
        """The engine's question; what is not understood outweighs what is broken."""
        try:
            findings = [self._judge(spot, module) for spot in self.spots(module)]
        except Exception as error:
            return incompatible(f"{type(error).__name__}: {error}")
        for make in (incompatible, needed):
            reasons = [finding.reason for finding in findings if finding.verdict == make("").verdict]
            if reasons:
                return make("; ".join(dict.fromkeys(reasons)))
        return not_needed("; ".join(dict.fromkeys(finding.reason for finding in findings)) or self.fine)

    def patches(self, module: ModuleType) -> list[Patch]:
        """One patch for each spot that is broken."""
        wanted = needed("").verdict
        return [spot.patch(module) for spot in self.spots(module) if self._judge(spot, module).verdict == wanted]


def accepts(function: Callable, name: str) -> bool:
    """Whether ``function`` takes a keyword argument ``name``, seen through wrappers that pass everything on."""
    for layer in layers(function):
        parameters = inspect.signature(layer, follow_wrapped=False).parameters
        if name in parameters:
            return parameters[name].kind not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_KEYWORD)
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            return False
    return True


def parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """The named parameters of a method, without ``self``, ``*args`` and ``**kwargs``, in order."""
    bulk = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {n: p for n, p in inspect.signature(function).parameters.items() if p.kind not in bulk}
    named.pop(next(iter(named), None), None)
    return named
