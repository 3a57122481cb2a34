"""``comfy_quant``, the JSON that a quantized layer carries: reading every form it comes in, and writing one.

In a file it is a uint8 tensor ``<layer>.comfy_quant`` that holds the bytes of a JSON object. Converters
and node packs have also been seen to leave a dict, bytes, a string, JSON encoded twice, or the bare name
of the format; and to put ``convrot`` either at the top level or under ``params``. ComfyUI reads one form
(and which place it looks in has changed between releases), so what was read is written back in that form.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch

#: ComfyUI's names of the formats that these hooks look after, and of the layouts that it puts them into.
NVFP4, INT8 = "nvfp4", "int8_tensorwise"
NVFP4_LAYOUT, INT8_LAYOUT = "TensorCoreNVFP4Layout", "TensorWiseINT8Layout"

DEFAULT_GROUP_SIZE = 256


@dataclass(frozen=True)
class Declaration:
    """What a layer's configuration says: ComfyUI's name of the storage format, and the group size of the
    rotation that the weight is stored under, None if it is not rotated.
    """

    format: str
    group_size: int | None = None


def decode(raw) -> dict | None:
    """The configuration as a dict; None when there is none.

    ``raw``: None, a dict, a uint8 tensor on any device, bytes, or a string. ValueError when it is none of
    these, or not JSON.
    """
    if raw is None or isinstance(raw, dict):
        return raw
    text = raw
    if isinstance(raw, torch.Tensor):
        text = bytes(raw.detach().cpu().flatten().to(torch.uint8).tolist())
    if isinstance(text, (bytes, bytearray, memoryview)):
        text = bytes(text).decode("utf-8")
    if not isinstance(text, str):
        raise ValueError(f"comfy_quant is a {type(raw).__name__}, expected a uint8 tensor that holds JSON")
    return _parse(text)


def _parse(text: str) -> dict:
    value = text
    # Each round takes off one layer of encoding; a string that is no JSON any more is a format's name.
    while isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            if not value.replace("_", "").isalnum():
                raise ValueError(f"comfy_quant is not JSON: {value[:80]!r}") from None
            return {"format": value}
    if not isinstance(value, dict):
        raise ValueError(f"comfy_quant holds a JSON {type(value).__name__}, expected an object")
    return value


def encode(settings: dict) -> torch.Tensor:
    """``settings`` as ComfyUI stores it: a uint8 tensor of the JSON's bytes, on the CPU."""
    return torch.tensor(list(json.dumps(settings).encode("utf-8")), dtype=torch.uint8)


def stock_reads(raw, settings: dict) -> bool:
    """Whether every release of ComfyUI reads ``raw``, decoded as ``settings``, by itself."""
    if not isinstance(raw, torch.Tensor) or raw.device.type != "cpu" or plain(settings) != settings:
        return False
    try:
        return isinstance(json.loads(raw.numpy().tobytes()), dict)
    except ValueError:
        return False


def plain(settings: dict) -> dict:
    """``settings`` with the rotation at the top level, where every release of ComfyUI looks for it."""
    nested = _nested(settings)
    found = {name: nested[name] for name in ("convrot", "convrot_groupsize") if name in nested}
    return {**found, **settings}


def declaration(settings: dict) -> Declaration:
    """What ``settings`` declare. ValueError or TypeError when the group size is not a number."""
    settings = plain(settings)
    rotated = _true(settings.get("convrot"))
    size = int(settings.get("convrot_groupsize") or DEFAULT_GROUP_SIZE) if rotated else None
    return Declaration(str(settings.get("format")), size)


def shape(settings: dict) -> tuple[int, ...] | None:
    """The logical (out, in) of the weight where ``settings`` say it; the stored one may be padded."""
    for place in (settings, _nested(settings)):
        if place.get("orig_shape"):
            return tuple(int(size) for size in place["orig_shape"])
        if place.get("out_features") and place.get("in_features"):
            return int(place["out_features"]), int(place["in_features"])
    return None


def _nested(settings: dict) -> dict:
    nested = settings.get("params")
    return nested if isinstance(nested, dict) else {}


def _true(value) -> bool:
    return value.strip().lower() in ("true", "1") if isinstance(value, str) else bool(value)
