"""Open a LoRA: one file or dict -> its family, its layers as adapters, and everything that was left out and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike

import torch

from . import adapters, families, rules
from .adapters import Adapter
from .errors import FileError, IncompleteAdapter, UnsupportedAdapter
from .families import Family
from .keys import FLAGS, Role, Resolved, Resolver, Target, TEXT_ENCODER
from .layer import Layer
from .nearest import Nearest
from .recognise import recognise
from .source import Source, open_source


@dataclass
class LoraFile:
    """What a file holds for the transformer.

    ``layers``             target -> adapter, in the file's order.
    ``skipped``            (key, reason): understood, but left out.
    ``unknown``            (key, reason with the nearest name that exists): not understood.
    ``text_encoder_keys``  keys of text encoders, for the caller; also in ``skipped``.
    ``family``             None only for a file that holds nothing but text encoder keys.
    """

    name: str
    family: Family | None
    metadata: dict[str, str]
    layers: dict[Target, Adapter] = field(default_factory=dict)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    unknown: list[tuple[str, str]] = field(default_factory=list)
    text_encoder_keys: list[str] = field(default_factory=list)


def open_lora(source: str | PathLike | Mapping[str, torch.Tensor], *, name: str | None = None,
              family: Family | str | None = None, metadata_alpha: bool = False,
              convention: str = "comfyui") -> LoraFile:
    """Open a LoRA for a Qwen-Image or Z-Image model.

    ``source``          path of a safetensors file (mapped, its data read on demand) or a dict of tensors.
    ``name``            what messages and reports call it; default: the file's name.
    ``family``          the model's family, if known; a file of another one is refused.
    ``metadata_alpha``  where a layer has no alpha tensor, take alpha from the file's metadata, as
                        diffusers does; ComfyUI, and the default, use a scale of 1.
    ``convention``      "comfyui" or "trainer": whose formula is followed where they differ (rules.py).

    Raises :class:`FileError` (cannot be read, contradicts itself), :class:`UnknownFamily` (made for another
    model), :class:`ShapeError` (factors that do not fit each other), :class:`UnsupportedAdapter` (none
    of its layers can be applied). The data is not looked at: NaN and Inf are found by ``Adapter.delta``.
    """
    opened = open_source(source, name)
    config = rules.adapter_config(opened.metadata) if metadata_alpha else None
    flags = {key for key in opened.entries if key in FLAGS}
    followed = rules.Rules(convention, config, _flag(opened, flags))
    named = [key for key in opened.entries if key not in flags]
    chosen = recognise(opened.name, named, family and families.get(family))
    file = LoraFile(opened.name, chosen, opened.metadata)
    file.skipped += [(key, "describes the file") for key in sorted(flags)]
    groups = _group(file, opened, named)
    for target, resolved in groups.items():
        _build(file, opened, target, resolved, followed)
    _refuse_if_nothing_left(file, groups)
    return file


def _flag(source, flags) -> bool:
    return "use_rslora_flag" in flags and bool(source.tensor("use_rslora_flag").any())


def _group(file: LoraFile, source: Source, keys: list[str]) -> dict[Target, dict[Role, Resolved]]:
    """Sort ``keys`` into layers; the ones that are in none go to the file's lists."""
    if file.family is None:
        file.text_encoder_keys = list(keys)
        file.skipped += [(key, TEXT_ENCODER) for key in keys]
        return {}
    resolver, nearest = Resolver(file.family), Nearest([file.family])
    groups: dict[Target, dict[Role, Resolved]] = {}
    for key in keys:
        resolved = resolver(key)
        if resolved.skipped is not None:
            file.text_encoder_keys.append(key)
            file.skipped.append((key, resolved.skipped))
        elif resolved.unknown is not None:
            file.unknown.append((key, nearest(key)))
        else:
            layer = groups.setdefault(resolved.target, {})
            if resolved.role in layer:
                _check_same(file, source, layer[resolved.role].key, key)
            else:
                layer[resolved.role] = resolved
    return groups


def _check_same(file, source, first, second):
    """Two spellings of one tensor are fine if they agree; the second is left out."""
    one, other = source.entries[first], source.entries[second]
    if (one.dtype, one.shape) != (other.dtype, other.shape) or not torch.equal(source.tensor(first), source.tensor(second)):
        raise FileError(f"means the same as {first!r}, with another content; the file holds two adapters in one",
                        file=file.name, key=second)
    file.skipped.append((second, f"the same as {first}"))


def _build(file, source, target, resolved, followed):
    keys = {role: entry.key for role, entry in resolved.items()}
    layer = Layer(target, keys, source, next(iter(resolved.values())).stem, followed)
    try:
        file.layers[target] = adapters.from_layer(layer)
    except (IncompleteAdapter, UnsupportedAdapter) as error:
        file.skipped += [(key, error.problem) for key in keys.values()]


def _refuse_if_nothing_left(file, groups):
    if file.layers or file.text_encoder_keys or not groups:
        return
    key, reason = next(entry for entry in file.skipped if entry[0] not in FLAGS)
    raise UnsupportedAdapter(f"none of its {len(groups)} layers can be applied: {reason}", file=file.name, key=key)
