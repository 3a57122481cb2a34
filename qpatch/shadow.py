"""What the finder does about a target: asks the others for it, and watches the loader that they found.

It searches nothing on its own. ``exec_module`` is shadowed *on the loader instance*, and the shadow
takes itself off as its first act, so the module body, ``inspect``, ``importlib.resources``, ``pickle``
and ``reload`` all meet the original loader.

Imported through ``finder.load_shadow`` only, and under the import lock: see there.
"""

import sys
from _frozen_importlib_external import SourceFileLoader, SourcelessFileLoader
from _thread import _local

from .finder import is_ours, unwatched

_thread = _local()


def find(name, path, target):
    """The spec that the finders behind ours give for the target ``name``, its loader watched; None if none does.

    importlib calls finders while it holds the global import lock: nothing may be imported here,
    not even a module of ours, or two threads can wait for each other for ever.
    """
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
