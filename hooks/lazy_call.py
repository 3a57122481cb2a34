"""A function that takes Linears, made to work on lazy ones: by adapting its arguments."""

import inspect

import torch

from .lazy_lend import declared_dtype, describe, lazy, lend, quantized


class Call:
    """One call of a function with this ``signature``: its arguments by name, to read and to exchange.

    Raises TypeError if the arguments do not fit the signature.
    """

    def __init__(self, signature, args, kwargs):
        self.bound = signature.bind(*args, **kwargs)
        self.named = signature.parameters
        self.extra = next((p.name for p in self.named.values() if p.kind is p.VAR_KEYWORD), None)

    def asked(self, name):
        """What the call, or else the signature's default, says for ``name``; None if neither does."""
        if name in self.bound.arguments:
            return self.bound.arguments[name]
        if name in self.named:
            default = self.named[name].default
            return None if default is inspect.Parameter.empty else default
        return self.bound.arguments.get(self.extra, {}).get(name)

    def drop_extra(self, name):
        """Leave ``name`` out of the free keywords, if it is among them."""
        given = self.bound.arguments.get(self.extra, {})
        if name in given:
            self.bound.arguments[self.extra] = {key: value for key, value in given.items() if key != name}

    def lend(self, names):
        """Exchange the lazy Linears among the arguments ``names``; {id of the twin: the Linear itself}."""
        arguments = self.bound.arguments
        asked, first = self.asked("torch_dtype"), self.asked(names[0])
        dtype = asked if isinstance(asked, torch.dtype) else declared_dtype(first)
        sources = {}
        for name in names:
            source = self.asked(name)
            arguments[name] = lend(source, dtype, self.asked("device"))
            sources[id(arguments[name])] = source
        if lazy(first):
            # Its twin lies on that device now. Functions that take the device from the weight
            # hand their free keywords on, where a second `device` is a TypeError.
            self.drop_extra("device")
        return sources


def lending(original, names: tuple[str, ...]):
    """``original``, with its arguments ``names`` given parameters for the time of the call if they are lazy.

    A call without a lazy Linear goes through with the very objects it came with. A layer that
    is quantized already ends in a TypeError that says so, where upstream would stumble over its
    missing weight.
    """
    signature = inspect.signature(original)

    def mended(*args, **kwargs):
        call = Call(signature, args, kwargs)
        linears = [call.asked(name) for name in names]
        if not any(map(lazy, linears)):
            return _plain(original, linears, args, kwargs)
        sources = call.lend(names)
        made = original(*call.bound.args, **call.bound.kwargs)
        # Something that hands its argument back must not hand out the twin.
        return sources.get(id(made), made)

    return mended


def _plain(original, linears, args, kwargs):
    try:
        return original(*args, **kwargs)
    except AttributeError as error:
        second = next((layer for layer in linears if quantized(layer)), None)
        if second is None:
            raise
        raise TypeError(
            f"{original.__qualname__} wants a plain Linear and got {describe(second)}, which is quantized already: "
            "this model has been through here before; load it afresh instead"
        ) from error
