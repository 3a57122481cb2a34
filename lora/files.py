"""Open a LoRA: one file or dict -> its family, its layers as adapters, and everything that was left out and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike

import torch

from . import adapters, families
from .adapters import Adapter
from .collecting import no_collections
from .errors import IncompleteAdapter, LoraError, UnsupportedAdapter
from .families import Family
from .grouping import Grouping, overlaps
from .keys import FLAGS, TEXT_ENCODER, Target
from .layer import Layer
from .recognise import recognise
from .roles import Role
from .rules import Rules, adapter_config
from .source import Source, open_source


@dataclass(eq=False)
class LoraFile:
    """What a file holds for the transformer.

    ``layers``             target -> adapter, in the file's order.
    ``skipped``            (key, reason): understood, but left out.
    ``unknown``            (key, reason with the nearest name that exists): not understood.
    ``strays``             adapters of layers whose keys are in ``unknown``: what they weigh is lost.
    ``text_encoder_keys``  keys of text encoders, for the caller; also in ``skipped``.
    ``source``             where its tensors come from.
    ``family``             None only for a file that holds nothing but text encoder keys.
    """

    name: str
    family: Family | None
    metadata: dict[str, str]
    layers: dict[Target, Adapter] = field(default_factory=dict)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    unknown: list[tuple[str, str]] = field(default_factory=list)
    strays: list[Adapter] = field(default_factory=list)
    text_encoder_keys: list[str] = field(default_factory=list)
    source: Source | None = field(default=None, repr=False)


def open_lora(source: str | PathLike | Mapping[str, torch.Tensor], *, name: str | None = None,
              family: Family | str | None = None, metadata_alpha: bool = False,
              convention: str = "comfyui") -> LoraFile:
    """Open a LoRA for a Qwen-Image or Z-Image model.

    ``source``          path of a safetensors file (its data is read on demand) or a dict of tensors.
    ``name``            what messages and reports call it; default: the file's name.
    ``family``          the model's family, if known; a file of another one is refused.
    ``metadata_alpha``  where a layer has no alpha tensor, take alpha from the file's metadata, as
                        diffusers does; ComfyUI, and the default, use a scale of 1.
    ``convention``      "comfyui" or "trainer": whose formula is followed where they differ (adapters/dora.py, oft.py).

    Raises :class:`FileError` (cannot be read, contradicts itself), :class:`UnknownFamily` (made for another
    model), :class:`ShapeError` (factors that do not fit each other), :class:`UnsupportedAdapter` (none
    of its layers can be applied). The data is not looked at: NaN and Inf are found by ``Adapter.delta``.
    """
    with no_collections():
        return _open(open_source(source, name), family, metadata_alpha, convention)


def _open(opened: Source, family: Family | str | None, metadata_alpha: bool, convention: str) -> LoraFile:
    flags = sorted(key for key in opened.entries if key in FLAGS)
    keys = [key for key in opened.entries if key not in FLAGS]
    wanted = None if family is None else families.get(family)
    resolver = recognise(opened.name, keys, wanted)
    file = LoraFile(opened.name, resolver and resolver.family, opened.metadata, source=opened)
    file.skipped += [(key, "describes the file") for key in flags]
    if resolver is None:
        file.text_encoder_keys = keys
        file.skipped += [(key, TEXT_ENCODER) for key in keys]
        return file
    config = adapter_config(opened.metadata) if metadata_alpha else None
    _fill(file, opened, Grouping(opened, resolver, keys), Rules(convention, config, _rslora(opened, flags)))
    return file


def _rslora(source: Source, flags) -> bool:
    return "use_rslora_flag" in flags and bool(source.tensor("use_rslora_flag").any())


def _fill(file: LoraFile, source: Source, grouping: Grouping, rules: Rules):
    file.skipped += grouping.skipped
    file.unknown, file.text_encoder_keys = grouping.unknown, grouping.texts
    for target, resolved in grouping.layers.items():
        keys = {role: entry.key for role, entry in resolved.items()}
        layer = Layer(target, keys, source, next(iter(resolved.values())).stem, rules)
        try:
            file.layers[target] = adapters.from_layer(layer)
        except (IncompleteAdapter, UnsupportedAdapter) as error:
            file.skipped += [(key, error.problem) for key in keys.values()]
    for target, reason in overlaps(file.family, file.layers).items():
        file.skipped += [(key, reason) for key in file.layers.pop(target).keys.values()]
    file.strays = _strays(source, grouping.strays, rules)
    _refuse_if_nothing_left(file)


def _strays(source: Source, layers: dict[str, dict[Role, str]], rules: Rules) -> list[Adapter]:
    found = []
    for stem, keys in layers.items():
        try:
            found.append(adapters.from_layer(Layer(Target(stem), keys, source, stem, rules)))
        except LoraError:
            # No whole adapter, so nothing that could be measured; its keys are reported either way.
            continue
    return found


def _refuse_if_nothing_left(file: LoraFile):
    left_out = [entry for entry in file.skipped if entry[0] not in FLAGS and entry[1] != TEXT_ENCODER]
    if not file.layers and left_out:
        key, reason = left_out[0]
        raise UnsupportedAdapter(f"nothing in this file can be applied: {reason}", file=file.name, key=key)
