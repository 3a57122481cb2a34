"""Hook ``comfy-compat-config-copy``: a model configuration can be copied and pickled.

It answers None, with a warning, for every attribute that it does not have; ``copy.deepcopy`` takes that
for a method and stops with "'NoneType' object is not callable". Nodes that copy a patcher (FLUX and
Qwen-Image LoRA nodes) meet it.
"""

from types import FunctionType, SimpleNamespace

from . import Repair, Spot


def _claims_every_name(original, module):
    # The question itself would be logged as a warning: it is put to a copy of the function that logs nowhere.
    silent = SimpleNamespace(warning=lambda *_: None)
    asked = FunctionType(original.__code__, {**original.__globals__, "logging": silent}, closure=original.__closure__)
    try:
        asked(object.__new__(module.BASE), "__deepcopy__")
    except AttributeError:
        return None
    return "it answers None for __deepcopy__, and copying stops"


def _not_those_of_python(original, module):
    def __getattr__(self, name):
        # Python asks for its own protocols this way; only "there is none" is an answer it understands.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return original(self, name)
    return __getattr__


REPAIR = Repair(
    Spot("BASE.__getattr__", _claims_every_name, _not_those_of_python, absent="it has no __getattr__"),
    fine="it does not claim attributes that it lacks",
)
examine, patches = REPAIR.examine, REPAIR.patches
