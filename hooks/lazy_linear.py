"""Hook ``lazy-linear``, nunchaku.models.linear: ``from_linear`` on a Linear that has no weight yet.

``SVDQW4A4Linear.from_linear`` takes dtype and device from ``linear.weight``, the dtype as the
default of a ``kwargs.pop``, which is evaluated even when ``torch_dtype`` was passed. All its
classes take ``linear.bias is not None`` for "wants a bias" and so drop a bias that a lazy Linear
has declared, without a word.

Of the other places in nunchaku that read the parameters of a Linear, those that read dtype and
device only are mended by their own modules (lazy_fuse, lazy_w4, lazy_zimage_ff). Left alone are
the LoRA functions of NunchakuFluxTransformer2dModel, which read the *values* of ``x_embedder`` of
a model that is loaded (lent zeros would be a silent fault), NunchakuT5EncoderModel, which reads
the layers of a transformers model that it builds itself, and the convolutions of the SDXL UNet:
ComfyUI has no lazy convolution.
"""

import inspect

import torch

from qpatch.finding import INCOMPATIBLE, NEEDED, Finding, incompatible, needed
from qpatch.patching import Wrap

from .lazy_call import lending
from .lazy_probe import UnfilledLinear, verdict, with_state


def examine(module):
    main = _examined(module.SVDQW4A4Linear)
    if main.verdict == INCOMPATIBLE:
        return main
    found = [main, *(_examined(cls) for cls in _classes(module) if cls is not module.SVDQW4A4Linear)]
    faults = [finding.reason for finding in found if finding.verdict == NEEDED]
    return with_state(needed("; ".join(faults)) if faults else main)


def patches(module):
    for cls in _classes(module):
        if _examined(cls).verdict == NEEDED:
            yield Wrap(cls, "from_linear", lambda original: lending(original, _linear_of(original)))


def _classes(module) -> list[type]:
    """The classes that ``module`` itself defines and that have a ``from_linear`` of their own."""
    return [
        value for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and "from_linear" in vars(value)
    ]


def _linear_of(function) -> tuple[str, ...]:
    """Name of the parameter behind ``cls``."""
    return tuple(inspect.signature(function).parameters)[1:2]


def _examined(cls: type) -> Finding:
    name = f"{cls.__name__}.from_linear"
    function = vars(cls).get("from_linear")
    if not isinstance(function, classmethod):
        return incompatible(f"{name} is {'gone' if function is None else 'not a classmethod'}")
    try:
        signature = inspect.signature(function.__func__)
        signature.bind(cls, None, torch_dtype=None)
    except (TypeError, ValueError) as error:
        return incompatible(f"{name} does not take (linear, torch_dtype=...): {error}")
    default = getattr(signature.parameters.get("torch_dtype"), "default", None)
    return verdict(name, lambda prepare: _fault(cls, prepare, default if isinstance(default, torch.dtype) else None))


def _fault(cls, prepare, default: torch.dtype | None) -> str | None:
    """What is wrong with the layer that ``cls.from_linear`` makes, with and without torch_dtype."""
    for asked in (torch.float16, None):
        source = UnfilledLinear(bias=True)
        layer = cls.from_linear(prepare(source), **({} if asked is None else {"torch_dtype": asked}))
        if getattr(layer, "bias", None) is None:
            return "drops the bias that the Linear declares"
        wanted = asked or default or source.weight_comfy_model_dtype
        if layer.bias.dtype != wanted:
            return f"makes a layer of {layer.bias.dtype} where {wanted} is asked for or declared"
        if layer.bias.device.type != "cpu":
            return f"puts the layer on {layer.bias.device} before it is loaded"
    return None
