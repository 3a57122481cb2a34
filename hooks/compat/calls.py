"""Calls that name arguments which a method does not know: bound to what it understands, by one written rule.

ComfyUI gives its methods new keyword arguments; an override in a node pack keeps the signature it
was written with. Of an argument that the override does not know:

- its default in ComfyUI's own method means "as before": it is left out;
- a value that the object meets anyway (``inert``) is left out;
- any other value asks for something. Where ComfyUI's own method does it rightly for this class
  (``through``), that method is called in place of the override; else the call is refused with a
  TypeError that names the argument. Nothing that matters is dropped silently.
"""

import functools

from qpatch import log

from . import accepts, parameters


def lacking(override, base) -> list[str]:
    """The arguments of the method ``base`` that ``override`` does not take."""
    return [name for name in parameters(base) if not accepts(override, name)]


def fit(override, base, *, inert=(), through=False):
    """``override``, made to take what ``base`` takes.

    ``inert``: names -> predicate (self, value), true where the value asks for nothing new.
    ``through``: whether ``base`` itself may serve a call that ``override`` cannot.
    """
    inert = dict(inert)
    known = parameters(base)
    # Asked once for each name: blocks of a model are called at each step.
    takes = functools.cache(lambda name: accepts(override, name))

    def call(self, *args, **kwargs):
        asked = {}
        for name in [name for name in kwargs if not takes(name)]:
            value = kwargs.pop(name)
            if not (name in known and _same(value, known[name].default)) and not inert.get(name, _never)(self, value):
                asked[name] = value
        if not asked:
            return override(self, *args, **kwargs)
        if through and set(asked) <= set(known):
            log.debug(f"{_title(self, override)} does not know {_list(asked)}: ComfyUI's own method serves this call")
            return base(self, *args, **kwargs, **asked)
        raise TypeError(f"{_title(self, override)} does not know {_list(asked)}, which asks for something; "
                        "the node pack that this class comes from has to be updated")

    return call


def _never(self, value) -> bool:
    return False


def _same(value, default) -> bool:
    plain = isinstance(value, (bool, int, float, str)) and type(value) is type(default)
    return value is default or (plain and value == default)


def _title(self, function) -> str:
    return f"{type(self).__name__}.{function.__name__}()"


def _list(asked: dict) -> str:
    return ", ".join(f"{name}={value if isinstance(value, (bool, int, float, str)) else type(value).__name__}"
                     for name, value in asked.items())
