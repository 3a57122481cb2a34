"""The meta-path finder: notices that a target is being imported, and says so to the engine.

Loaded at every interpreter start, so it imports only what the interpreter itself has loaded.
It searches nothing on its own: for a target it asks the other finders, and shadows
``exec_module`` *on the loader instance* they found. The shadow takes itself off as its first
act, so the module body, ``inspect``, ``importlib.resources``, ``pickle`` and ``reload`` all
meet the original loader.
"""

import sys
from _frozen_importlib_external import SourceFileLoader, SourcelessFileLoader
from _thread import _local

#: Last component of a target's name -> the patterns that end in it. A pattern is a full module
#: name, or ``*.`` and a tail (ComfyUI names a custom node by its folder's path). It repeats
#: what catalogue.py says, because that module is too large to load at every start; a test
#: keeps the two equal.
TARGETS = {
    "linear": ("nunchaku.models.linear", "nunchaku.models.text_encoders.linear"),
    "utils": ("nunchaku.models.utils",),
    "transformer_zimage": ("nunchaku.models.transformers.transformer_zimage",),
    "zimage": ("*.models.zimage",),
    "smoke": ("qpatch.smoke",),
}


def matches(name, patterns):
    """Whether the module name ``name`` fits one of ``patterns``."""
    for pattern in patterns:
        if name == pattern or (pattern[0] == "*" and name.endswith(pattern[1:])):
            return True
    return False


class Finder:
    """Answers for target modules only; every other name costs one look-up in a dict."""

    #: How a second copy of qpatch (user site and venv, editable and wheel) knows this one.
    qpatch_finder = True

    def __init__(self):
        self._thread = _local()

    def find_spec(self, name, path=None, target=None):
        """The spec that the other finders give for a target, its loader watched; else None."""
        patterns = TARGETS.get(name.rpartition(".")[2])
        if patterns is None or not matches(name, patterns):
            return None
        # A finder that we ask may ask all finders in its turn, us included.
        busy = self._thread.__dict__.setdefault("busy", set())
        if name in busy:
            return None
        busy.add(name)
        try:
            spec = self._ask_others(name, path, target)
        finally:
            busy.discard(name)
        if spec is not None:
            watch(spec)
        return spec

    def _ask_others(self, name, path, target):
        # Not importlib.util.find_spec: that one takes module locks and can deadlock.
        for other in list(sys.meta_path):
            if getattr(other, "qpatch_finder", False):
                continue
            find_spec = getattr(other, "find_spec", None)
            spec = find_spec(name, path, target) if find_spec is not None else None
            if spec is not None:
                return spec
        return None


class Shadow:
    """Stands in for ``exec_module`` on one loader instance, for one execution.

    A module-level class, so that a spec that was found but never executed can be pickled.
    """

    def __init__(self, loader, name):
        self.loader = loader
        self.name = name

    def __call__(self, module):
        self.loader.__dict__.pop("exec_module", None)
        self.loader.exec_module(module)
        executed(self.name, module)


# The interpreter leaves its own import machinery out of tracebacks by looking at file and
# function name. A frame of ours in the middle would bring all of it back, into each traceback
# of a node pack that fails to import, so this one frame is named as a part of the machinery.
Shadow.__call__.__code__ = Shadow.__call__.__code__.replace(
    co_filename="<frozen importlib._bootstrap>", co_name="_call_with_frames_removed"
)


def executed(name, module):
    """Hand a module whose body has just run to the engine; nothing of ours may break the import."""
    # A module may have put something else in its place.
    module = sys.modules.get(name, module)
    try:
        from . import engine
    except Exception as error:
        import qpatch

        qpatch.activation_error = error
        return
    engine.loaded(name, module)


def watch(spec):
    """Shadow the loader of ``spec``, or leave it alone where that is not safe, and say so."""
    loader = spec.loader
    # Another post-import library or importlib.util.LazyLoader wraps the loader it found.
    for _ in range(4):
        if type(loader) in (SourceFileLoader, SourcelessFileLoader):
            loader.exec_module = Shadow(loader, spec.name)
            return
        loader = getattr(loader, "loader", None)
    # Namespace packages have nothing to run. Zip, frozen, built-in and extension loaders are
    # shared between modules, or their modules cannot be patched.
    from . import engine

    engine.unwatched(spec.name, spec.loader)


def install():
    """Insert the finder unless one stands there, and offer targets imported before it came."""
    for other in sys.meta_path:
        if getattr(other, "qpatch_finder", False):
            return
    sys.meta_path.insert(0, Finder())
    for name in list(sys.modules):
        patterns = TARGETS.get(name.rpartition(".")[2])
        if patterns is not None and matches(name, patterns):
            from . import engine

            engine.catch_up()
            return
