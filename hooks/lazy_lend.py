"""The lazy Linear: what it is, and a twin of it that has parameters to look at.

Under dynamic VRAM ComfyUI builds a Linear without parameters (``weight`` and ``bias`` are None);
they come with the state dict. Code that makes a quantized layer out of it reads only what kind
of tensors it has, and what a lazy Linear has instead are declarations: ``in_features``,
``out_features``, ``weight_comfy_model_dtype`` and ``comfy_need_lazy_init_bias``.

The Linear itself is never changed. What is handed on is a twin that shares everything with it
and has, in addition, placeholders of one element each: the source is as it was whatever the
callee does, raising included, and no other thread sees anything.
"""

import torch


def quantized(layer) -> bool:
    """Whether ``layer`` is one of nunchaku's quantized layers (its ``weight`` may be None as well)."""
    return getattr(layer, "qweight", None) is not None


def lazy(linear) -> bool:
    """Whether ``linear`` is a Linear that has not got its weight yet."""
    if getattr(linear, "weight", None) is not None or quantized(linear):
        return False
    return all(isinstance(getattr(linear, name, None), int) for name in ("in_features", "out_features"))


def declared_dtype(linear) -> torch.dtype | None:
    """The dtype of the weight, or the one that a lazy Linear declares for it; None if it is unknown."""
    weight = getattr(linear, "weight", None)
    if weight is not None:
        return weight.dtype
    declared = getattr(linear, "weight_comfy_model_dtype", None)
    return declared if isinstance(declared, torch.dtype) else None


def wants_bias(linear) -> bool:
    """Whether a bias will come with the state dict."""
    return getattr(linear, "bias", None) is None and bool(getattr(linear, "comfy_need_lazy_init_bias", False))


def own_device(linear) -> torch.device | None:
    """Where the first tensor that ``linear`` itself holds lies; None if it holds none."""
    held = vars(linear)
    for tensors in (held.get("_parameters", {}), held.get("_buffers", {}), {"bias": held.get("bias")}):
        for tensor in tensors.values():
            if tensor is not None:
                return tensor.device
    return None


def describe(linear) -> str:
    """``linear`` for an error message: class and features."""
    features = (f"{name}={getattr(linear, name, '?')}" for name in ("in_features", "out_features"))
    return f"{type(linear).__qualname__}({', '.join(features)})"


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, device) -> torch.nn.Parameter:
    """A Parameter of ``shape`` that owns one element of memory, zero."""
    element = torch.zeros((), dtype=dtype, device=device)
    return torch.nn.Parameter(element.expand(shape), requires_grad=False)


def twin(module):
    """An object of the class of ``module`` with its attributes; its own dicts and sets, so that it can differ."""
    made = type(module).__new__(type(module))
    for name, value in vars(module).items():
        made.__dict__[name] = value.copy() if isinstance(value, (dict, set)) else value
    return made


def lend(linear, dtype: torch.dtype | None = None, device=None):
    """A twin of a lazy ``linear`` with a weight [out_features, in_features] and, if declared, a bias.

    ``dtype``: what the caller asks for, else the declared one. ``device``: what the caller asks
    for, else the Linear's own, else the CPU: that is where a Linear that is not lazy would lie
    at this point, and memory management counts on it. A Linear that has a weight is returned as
    it is, the same object. Raises TypeError if no dtype is known.
    """
    if not lazy(linear):
        return linear
    dtype = dtype or declared_dtype(linear)
    if dtype is None:
        raise TypeError(
            f"{describe(linear)} has no weight yet and declares no dtype for it; "
            "pass torch_dtype= (torch.bfloat16, or torch.float16 on Turing GPUs)"
        )
    # Not `device or ...`: 0 is a device.
    device = own_device(linear) or "cpu" if device is None else device
    lent = twin(linear)
    lent.weight = placeholder((linear.out_features, linear.in_features), dtype, device)
    if wants_bias(linear):
        lent.bias = placeholder((linear.out_features,), dtype, device)
    return lent
