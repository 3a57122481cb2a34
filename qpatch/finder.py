"""The meta-path finder: notices that a target is being imported, and says so to the engine.

Loaded at every interpreter start, so it imports only what the interpreter itself has loaded.
It searches nothing on its own: for a target it asks the finders behind it, and shadows
``exec_module`` *on the loader instance* they found. The shadow takes itself off as its first
act, so the module body, ``inspect``, ``importlib.resources``, ``pickle`` and ``reload`` all
meet the original loader.
"""

import sys
from _frozen_importlib_external import SourceFileLoader, SourcelessFileLoader
from _thread import _local

from . import __version__

#: Last component of a target's name -> the patterns that end in it. A pattern is a full module
#: name, or ``*.`` and a tail (ComfyUI names a custom node by its folder's path). It repeats
#: what catalogue.py says, because that module is too large to load at every start; a test
#: keeps the two equal.
TARGETS = {
    "base": ("comfy_kitchen.tensor.base",),
    "common": ("*.model_patcher.common",),
    "flux": ("*.wrappers.flux",),
    "linear": ("nunchaku.models.linear", "nunchaku.models.text_encoders.linear"),
    "lora": ("comfy.lora",),
    "model": ("comfy.ldm.qwen_image.model",),
    "model_detection": ("comfy.model_detection",),
    "model_patcher": ("comfy.model_patcher", "*.model_patcher"),
    "nunchaku_patch": ("*.patches.nunchaku_patch",),
    "ops": ("comfy.ops",),
    "qwenimage": ("*.model_configs.qwenimage", "*.models.qwenimage"),
    "smoke": ("qpatch.smoke",),
    "supported_models_base": ("comfy.supported_models_base",),
    "transformer_zimage": ("nunchaku.models.transformers.transformer_zimage",),
    "utils": ("nunchaku.models.utils",),
    "zimage": ("*.models.zimage", "*.model_patcher.zimage", "*.model_configs.zimage"),
}

#: Targets found with a loader that cannot be watched: module name -> what kind of loader.
unwatched = {}

_thread = _local()


def matches(name, patterns):
    """Whether the module name ``name`` fits one of ``patterns``."""
    for pattern in patterns:
        if name == pattern or (pattern[0] == "*" and name.endswith(pattern[1:])):
            return True
    return False


class Finder:
    """Answers for target modules only; every other name costs one look-up in a dict."""

    #: How a second copy of qpatch (user site and venv, editable and wheel) knows this one.
    qpatch_finder = __version__

    # Static, because importlib fetches it anew for each import: that spares a bound method each time.
    @staticmethod
    def find_spec(name, path=None, target=None):
        """The spec that the finders behind this one give for a target, its loader watched; else None."""
        if name.rpartition(".")[2] not in TARGETS:
            return None
        return _find_target(name, path, target)


def _find_target(name, path, target):
    """As :meth:`Finder.find_spec`.

    importlib calls finders while it holds the global import lock: nothing may be imported here,
    not even a module of ours, or two threads can wait for each other for ever.
    """
    if not matches(name, TARGETS[name.rpartition(".")[2]]):
        return None
    # A finder that we ask may ask all finders in its turn, us included. The guard belongs to the
    # thread: another thread that imports the same name must not be sent past us.
    busy = _thread.__dict__.setdefault("busy", set())
    if name in busy:
        return None
    busy.add(name)
    try:
        spec = _ask_those_behind(name, path, target)
    finally:
        busy.discard(name)
    if spec is not None:
        try:
            watch(spec)
        except Exception as error:
            # What another finder answers may be anything; that it cannot be watched must not stop the import.
            unwatched[name] = f"{type(spec).__name__} ({type(error).__name__}: {error})"
    return spec


def _ask_those_behind(name, path, target):
    # Those in front have been asked already. Not importlib.util.find_spec: that one imports the
    # parent package and takes module locks.
    finders = list(sys.meta_path)
    for place, other in enumerate(finders):
        if is_ours(other):
            finders = finders[place + 1:]
            break
    for other in finders:
        find_spec = getattr(other, "find_spec", None)
        spec = find_spec(name, path, target) if find_spec is not None else None
        if spec is not None:
            return spec
    return None


def is_ours(finder):
    """The version of the copy of qpatch that ``finder`` belongs to; None for anybody else's."""
    return getattr(type(finder), "qpatch_finder", None)


class Shadow:
    """Stands in for ``exec_module`` on one loader instance, for one execution.

    A module-level class with equality by name, so that a spec that was found but never executed
    can be pickled and compared.
    """

    def __init__(self, loader, name):
        self.loader = loader
        self.name = name

    def __eq__(self, other):
        return type(other) is Shadow and self.name == other.name

    def __hash__(self):
        return hash(self.name)

    def __call__(self, module):
        self.loader.__dict__.pop("exec_module", None)
        registered = sys.modules.get(self.name) is module
        try:
            self.loader.exec_module(module)
        except BaseException as error:
            # Takes this frame out of the traceback; a bare raise does not add it again.
            error.__traceback__ = error.__traceback__.tb_next
            raise
        # The body may have put something else in its place; a module that was never registered
        # (module_from_spec and exec_module by hand) is not to be confused with the one that is.
        executed(self.name, sys.modules.get(self.name, module) if registered else module)


if sys.version_info < (3, 11):
    # There a bare raise restores the traceback that was caught. The interpreter leaves its own import
    # machinery out of tracebacks by looking at file and function name, all of it or nothing: a frame
    # of ours in the middle would bring it back, so this one frame is named as a part of it.
    Shadow.__call__.__code__ = Shadow.__call__.__code__.replace(
        co_filename="<frozen importlib._bootstrap>", co_name="_call_with_frames_removed"
    )


def executed(name, module):
    """Hand a module whose body has just run to the engine; nothing of ours may break the import."""
    try:
        from . import engine

        failure = engine.loaded(name, module)
    except Exception as error:
        import qpatch

        qpatch.activation_error = error
        return
    # Only with QPATCH_STRICT.
    if failure is not None:
        raise failure


def watch(spec):
    """Shadow the loader of ``spec``; where that is not safe leave it alone and note its kind."""
    loader = spec.loader
    # Another post-import library or importlib.util.LazyLoader wraps the loader it found.
    for _ in range(4):
        if _can_be_shadowed(loader, spec.name):
            loader.exec_module = Shadow(loader, spec.name)
            unwatched.pop(spec.name, None)
            return
        loader = getattr(loader, "loader", None) or getattr(loader, "__wrapped__", None)
    # Namespace packages have nothing to run. Zip, frozen, built-in and extension loaders are
    # shared between modules, or their modules cannot be patched.
    kind = spec.loader if isinstance(spec.loader, type) else type(spec.loader)
    unwatched[spec.name] = kind.__name__


def _can_be_shadowed(loader, name):
    # type() and not isinstance(): a proxy claims the class of what it wraps. The name, because
    # only a loader made for this one module is not shared with others.
    return issubclass(type(loader), (SourceFileLoader, SourcelessFileLoader)) and loader.name == name


def install():
    """Insert the finder unless one stands there, and offer targets imported before it came."""
    standing = [other for other in sys.meta_path if is_ours(other)]
    if not standing:
        sys.meta_path.insert(0, Finder())
    elif not isinstance(standing[0], Finder):
        # Another copy of qpatch was first; two that patch the same modules would be one too many.
        return
    for name in list(sys.modules):
        if name.rpartition(".")[2] in TARGETS and matches(name, TARGETS[name.rpartition(".")[2]]):
            from . import engine

            engine.catch_up()
            return
