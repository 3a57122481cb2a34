"""Patches as objects: put in place together or not at all, taken back exactly, and checkable.

Whether a patch stands is read from the patched object itself. Replacements carry the mark
``__qpatch__`` (which hook put them there) and ``__wrapped__``; nothing is remembered that another
node pack could leave behind or peel off unseen. Several hooks may wrap one function, each once.
"""

from types import FunctionType

from .layers import MARK, bare, layers, marked, reaches, where

_ABSENT = object()


def dress(replacement, original, by: str = ""):
    """Give ``replacement`` the name, text and ``__wrapped__`` of ``original``, and the mark of the hook ``by``.

    Not ``functools.wraps``: that copies ``__dict__``, and with it marks that other tools
    (torch.compile among them) have put on the original.
    """
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        try:
            setattr(replacement, name, getattr(original, name))
        except AttributeError:
            pass
    replacement.__wrapped__ = original
    setattr(replacement, MARK, by)
    return replacement


class Patch:
    """One change of one object. Subclasses say how; :func:`put` and :func:`take_back` say when."""

    #: The hook it belongs to; the engine sets it.
    by = ""

    def apply(self):
        """Make the change. Raises if it cannot; must then have changed nothing."""
        raise NotImplementedError

    def revert(self):
        """Undo the change, if it still stands; leave alone what someone else put there."""
        raise NotImplementedError

    def lost(self) -> str | None:
        """None while the change is in effect, else who stands there now."""
        raise NotImplementedError

    def in_front(self) -> str | None:
        """Who has put something in front of the change that calls through to it; None if nobody has."""
        return None


class Wrap(Patch):
    """Replace the function ``owner.name`` by ``make(original)``.

    ``owner`` is a module or a class. Class methods and static methods keep their kind:
    ``make`` gets, and returns, the plain function.
    """

    def __init__(self, owner, name, make):
        self.owner, self.name, self.make = owner, name, make
        self.put = None
        self.before = _ABSENT

    def __repr__(self):
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.name}"

    def _raw(self):
        # vars, not getattr: a classmethod must not be bound, a lazy module not be woken.
        return vars(self.owner).get(self.name, _ABSENT)

    def _original(self):
        raw = self._raw()
        if raw is not _ABSENT:
            return raw
        for base in getattr(self.owner, "__mro__", ())[1:]:
            if self.name in vars(base):
                return vars(base)[self.name]
        raise AttributeError(f"{self!r} does not exist")

    def apply(self):
        original = self._original()
        if self._raw() is not _ABSENT and any(marked(layer, self.by) for layer in layers(original)):
            return
        plain = bare(original)
        replacement = dress(self.make(plain), plain, self.by)
        if isinstance(original, (classmethod, staticmethod)):
            replacement = type(original)(replacement)
        self.before, self.put = self._raw(), replacement
        setattr(self.owner, self.name, replacement)

    def revert(self):
        if self.put is None or self._raw() is not self.put:
            return
        if self.before is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)

    def lost(self):
        current = self._raw()
        if current is _ABSENT:
            return f"{self!r} is gone"
        # Somebody who wraps us and calls through leaves our behaviour in effect.
        if any(marked(layer, self.by) for layer in layers(current)):
            return None
        if self.put is not None and reaches(current, bare(self.put)):
            return None
        return f"{self!r} is now {where(current)}"

    def in_front(self):
        current = self._raw()
        # By the place of its code, not by our mark: functools.wraps copies the mark.
        if current is _ABSENT or current is self.put or where(current).startswith("qpatch."):
            return None
        return f"{self!r} is called through {where(current)}"


class Supply(Patch):
    """Give ``owner`` the attribute ``name``, which it lacks; never replaces one that exists."""

    def __init__(self, owner, name, value):
        self.owner, self.name, self.value = owner, name, value
        self.applied = False

    def __repr__(self):
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.name}"

    def apply(self):
        if self.name in vars(self.owner):
            return
        if isinstance(self.value, FunctionType):
            setattr(self.value, MARK, self.by)
        self.applied = True
        setattr(self.owner, self.name, self.value)

    def revert(self):
        if self.applied and vars(self.owner).get(self.name) is self.value:
            delattr(self.owner, self.name)

    def lost(self):
        current = vars(self.owner).get(self.name, _ABSENT)
        if current is _ABSENT:
            return f"{self!r} is gone"
        # A real one that arrived later is better than ours: nothing is lost by it.
        return None


def put(patches):
    """Apply ``patches`` in order; when one raises, take all of them back and re-raise."""
    try:
        for patch in patches:
            patch.apply()
    except BaseException:
        # All, not those that came to an end: an interrupt can fall between a change and the note of it.
        take_back(patches)
        raise


def take_back(patches):
    """Revert ``patches``, last first; one that cannot be reverted does not keep the others from it."""
    failure = None
    for patch in reversed(patches):
        try:
            patch.revert()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
