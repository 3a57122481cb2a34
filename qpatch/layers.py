"""Who stands at a function: marks, and the layers that a call goes through.

Whether a patch is in effect is read from the patched object itself, never from a note. Our
replacements carry the mark ``__qpatch__`` (which hook put them there) and ``__wrapped__``.
"""

from types import FunctionType, MethodType

MARK = "__qpatch__"
#: How many functions are looked at: a proxy may answer ``__wrapped__`` with something new each time.
_DEPTH = 64


def marked(function, by: str | None = None) -> bool:
    """Whether ``function`` (or the function inside a classmethod or staticmethod) is ours, or the hook ``by``'s."""
    own = getattr(bare(function), "__dict__", {})
    return MARK in own and (by is None or own[MARK] == by)


def layers(function):
    """``function`` and what it wraps, outermost first, as far as ``__wrapped__`` tells."""
    step, seen = bare(function), []
    while step is not None and len(seen) < _DEPTH and not _among(step, seen):
        yield step
        seen.append(step)
        step = getattr(step, "__wrapped__", None)


def reaches(function, wanted) -> bool:
    """Whether ``function`` is ``wanted`` or holds on to it in order to call it.

    Node packs mostly wrap without ``__wrapped__``: the original is then in the wrapper's closure,
    among its defaults, or in a global variable that its code names.
    """
    waiting, seen = [function], []
    while waiting and len(seen) < _DEPTH:
        step = bare(waiting.pop(0))
        if step is wanted:
            return True
        if isinstance(step, FunctionType) and not _among(step, seen):
            seen.append(step)
            # Global variables are looked at, not followed: everything can be reached through them.
            if any(bare(value) is wanted for value in _named_globals(step)):
                return True
            waiting += [getattr(step, "__wrapped__", None), *_captured(step)]
    return False


def _captured(function) -> list:
    cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _named_globals(function) -> list:
    return [function.__globals__.get(name) for name in function.__code__.co_names]


def _among(item, items) -> bool:
    return any(item is other for other in items)


def _filled(cell) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True


def bare(attribute):
    """The plain function inside a classmethod, staticmethod or bound method; anything else as it is."""
    return attribute.__func__ if isinstance(attribute, (classmethod, staticmethod, MethodType)) else attribute


def where(function) -> str:
    """Who made a function, for people: the module whose code it is, not the one that it says it is of."""
    plain = bare(function)
    # type() and not isinstance(): a proxy claims the class of what it wraps. functools.wraps copies
    # __module__ and __qualname__ of the wrapped function, so neither tells who wrapped it.
    if type(plain) is FunctionType:
        code = plain.__code__
        return f"{plain.__globals__.get('__name__', '?')}.{getattr(code, 'co_qualname', code.co_name)}"
    return f"{type(plain).__module__}.{type(plain).__qualname__}"
