"""ComfyUI-HSWQ-Loader-and-Tools beside these hooks: whose layer is it?

That pack handles ConvRot NVFP4 with functions that it puts over ComfyUI's when one of its loader nodes runs,
and takes off again in its purge. It marks layers and functions with attributes ``_hswq_*``. One of its
loaders rotates activations in the layer's forward, after having loaded the weight through whatever loader
stood there before it: a weight that already is in a rotated layout would be rotated twice.
"""

from __future__ import annotations

from types import FunctionType

#: Marks of those of its loaders that see to the rotation. Its other wraps only tidy up the configuration.
_LOADERS = ("_hswq_nvfp4", "_hswq_int8_protect")


def owns(module, outermost, ours) -> bool:
    """Whether the layer ``module``, being loaded through ``outermost``, is that pack's to rotate.

    ``outermost``: the loader function that ComfyUI calls now; ``ours``: the function of ours below it.
    """
    return _is_marked(module) or _stands_between(outermost, ours)


def _is_marked(module) -> bool:
    return any(name.startswith("_hswq_") for owner in (module, type(module)) for name in vars(owner))


def _stands_between(outermost, ours) -> bool:
    # Its wraps keep what they call in closures, without __wrapped__.
    waiting, seen = [outermost], {id(ours)}
    while waiting:
        function = waiting.pop()
        if id(function) in seen or not isinstance(function, FunctionType):
            continue
        seen.add(id(function))
        if any(name.startswith(_LOADERS) for name in vars(function)):
            return True
        waiting += [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    return False


def _filled(cell) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True
