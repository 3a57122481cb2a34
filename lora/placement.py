"""Where a layer of a LoRA lives in a model: which module, which of its rows, which part of the layer's change.

The same source layer may be a module of its own, a block of rows of a fused one, or, for a layer that
is fused in the file but not in the model, several modules. Names come from the family's tables; what a module is and
how large its parts are comes from the module that is really there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from .errors import LoraError, PlanError, ShapeError, UnsupportedAdapter
from .families import FAMILIES, Family
from .keys import Target
from .lowrank import to_dense
from .modules import Site, holds_low_rank, recognise
from .terms import Delta, Term

#: (name of a module, the module) -> why it is not to be touched, or None.
LeaveOut = Callable[[str, nn.Module], "str | None"]

#: Canonical name -> where NunchakuZImageFusedModule keeps its parameters:
#: module, weight of a norm, prefix of an SVDQ layer.
_FUSED_MODULE = {
    "attention.qkv": ("attention.fused_module", "weight", "qkv_"),
    "attention.q_norm": ("attention.fused_module", "norm_q_weight", ""),
    "attention.k_norm": ("attention.fused_module", "norm_k_weight", ""),
}

#: FLUX.1 in nunchaku's second class: layers that are fused in the model, renamed in it, or split by input columns.
_FLUX_PARTS = re.compile(r"(.*\.attn\.)(to_qkv|add_qkv_proj)")
_FLUX_NAMES = {"proj_mlp": "mlp_fc1"}
_FLUX_COLUMNS = {"proj_out": ("attn.to_out", "mlp_fc2")}
_QKV = ("q", "k", "v")


class NoPlace(LoraError):
    """The model has no module for a layer, or it is not to be touched: a miss, not a refusal."""


@dataclass(slots=True)
class Place:
    """``rows`` of ``site`` take ``source_rows`` and ``columns`` of a layer's change (None: all).

    ``main``: they take its bias too.
    """

    site: Site
    rows: slice
    source_rows: slice | None = None
    columns: slice | None = None
    main: bool = True

    def cut(self, delta: Delta) -> Delta:
        """What of ``delta`` goes here; raises :class:`UnsupportedAdapter` where it cannot be cut."""
        if self.source_rows is None and self.columns is None:
            return delta
        if delta.rebase is not None or delta.rebias is not None:
            raise UnsupportedAdapter("it depends on the weight of the whole layer, which this model keeps in several")
        rows, columns = self.source_rows or slice(None), self.columns or slice(None)
        return replace(
            delta,
            terms=tuple(Term(term.up[rows], term.down[:, columns], term.scale) for term in delta.terms),
            dense=None if delta.dense is None else to_dense(delta.dense)[rows, columns],
            replace=None if delta.replace is None else delta.replace[rows, columns],
            bias=None if delta.bias is None or not self.main else delta.bias[rows],
        )


class Places:
    """The modules of one model, by the names that LoRAs have for them. Each module is looked at once."""

    def __init__(self, root: nn.Module, family: Family | None, leave_out: LeaveOut | None = None):
        self.family = family
        # A module that is tied to another one has several names, and is one place: the one of its first name.
        self._modules = dict(root.named_modules(remove_duplicate=False))
        self._first = {id(module): path for path, module in reversed(self._modules.items())}
        self._leave_out = leave_out
        self._sites: dict[tuple[str, str], Site | None] = {}
        self._known: dict[str, tuple] = {}

    def find(self, target: Target, shape: tuple[int, ...] | None = None) -> list[Place]:
        """All places of a layer whose change is of ``shape`` ((out, in), (out,) or unknown).

        Raises :class:`NoPlace` if the model has no such layer, :class:`ShapeError` (without file and key) if the
        layer has another size, :class:`PlanError` if the module is not ready to be changed.
        """
        if target.module not in self._known:
            self._known[target.module] = self._names(target.module)
        whole, parts = self._known[target.module]
        site = next(filter(None, (self._site(*name) for name in whole)), None)
        if site is not None:
            places = [Place(site, _rows_of_part(site, target, parts))]
        elif parts:
            places = self._split(target, parts)
        else:
            places = self._columns(target)
        if not places:
            raise NoPlace(f"the model has no layer {target}")
        _check(places, shape, target)
        return places

    def _names(self, canonical: str):
        """([(module, attribute, prefix)] that may hold the whole, [(part, [names])] that may hold its parts)."""
        module = self.family and self.family.module(canonical)
        if module is None:
            return self._flux_names(canonical)
        before = canonical.removesuffix(module.name)
        names = [(before + name, "weight", "") for name in (module.name, *module.aliases)]
        if module.name in _FUSED_MODULE:
            path, attribute, prefix = _FUSED_MODULE[module.name]
            names.append((before + path, attribute, prefix))
        return names, [(part, [before + name for name in sources]) for part, sources in module.parts]

    def _flux_names(self, canonical: str):
        before, _, last = canonical.rpartition(".")
        if last in _FLUX_COLUMNS and f"{before}.{_FLUX_COLUMNS[last][1]}" in self._modules:
            return [], []
        name = f"{before}.{_FLUX_NAMES[last]}" if last in _FLUX_NAMES else canonical
        fused = _FLUX_PARTS.fullmatch(canonical)
        layer = "to_{}" if canonical.endswith("to_qkv") else "add_{}_proj"
        parts = [(part, [fused.group(1) + layer.format(part)]) for part in _QKV] if fused else []
        return [(name, "weight", ""), (canonical, "weight", "")], parts

    def _site(self, path: str, attribute: str = "weight", prefix: str = "") -> Site | None:
        module = self._modules.get(path)
        path = self._first.get(id(module), path)
        key = (path, prefix or attribute)
        if key not in self._sites:
            reason = self._leave_out(path, module) if self._leave_out and module is not None else None
            if reason:
                raise NoPlace(reason)
            label = path if attribute == "weight" and not prefix else f"{path}.{(prefix or attribute).rstrip('_')}"
            self._sites[key] = None if module is None else recognise(label, module, attribute, prefix)
        return self._sites[key]

    def _split(self, target: Target, parts) -> list[Place]:
        sites = {part: next(filter(None, map(self._site, names)), None) for part, names in parts}
        if target.part is not None:
            site = sites.get(target.part)
            return [Place(site, slice(0, site.out))] if site else []
        if not all(sites.values()):
            return []
        places, start = [], 0
        for site in sites.values():
            places.append(Place(site, slice(0, site.out), source_rows=slice(start, start + site.out)))
            start += site.out
        return places

    def _columns(self, target: Target) -> list[Place]:
        before, _, last = target.module.rpartition(".")
        sites = [self._site(f"{before}.{name}") for name in _FLUX_COLUMNS.get(last, ())]
        if not sites or not all(sites):
            return []
        places, start = [], 0
        for site in sites:
            columns = slice(start, start + site.inp)
            places.append(Place(site, slice(0, site.out), columns=columns, main=not start))
            start += site.inp
        return places


def _rows_of_part(site: Site, target: Target, parts) -> slice:
    if target.part is None:
        return slice(0, site.out)
    names = [part for part, _ in parts]
    if target.part not in names or site.out % len(names):
        raise NoPlace(f"the layer {site.path} has no part {target.part!r}")
    height = site.out // len(names)
    start = names.index(target.part) * height
    return slice(start, start + height)


def _check(places: list[Place], shape, target: Target) -> None:
    if shape is None:
        return
    if places[0].columns is not None:
        expected = (places[0].site.out, sum(place.site.inp for place in places))
    else:
        out = sum(place.rows.stop - place.rows.start for place in places)
        expected = (out,) if places[0].site.inp is None else (out, places[0].site.inp)
    if tuple(shape) != expected:
        raise ShapeError(f"the layer does not fit {target}", expected=list(expected), found=list(shape))


def locate(model: nn.Module) -> tuple[nn.Module, Family]:
    """The transformer inside ``model`` (which may wrap it) and its family.

    Raises :class:`PlanError` if there is none.
    """
    if not isinstance(model, nn.Module):
        raise PlanError("the model is a torch.nn.Module that holds the transformer", found=type(model).__name__)
    lists = {block.name for family in FAMILIES.values() for block in family.blocks}
    for path, module in model.named_modules():
        before, _, last = path.rpartition(".")
        if last in lists and _first_block(module) is not None:
            for family in FAMILIES.values():
                if _is_of(family, last, _first_block(module)):
                    return model.get_submodule(before), family
    titles = " or ".join(family.title for family in FAMILIES.values())
    raise PlanError(f"{type(model).__name__} holds no {titles} transformer")


def _first_block(blocks: nn.Module) -> nn.Module | None:
    return next(blocks.children(), None)


def _is_of(family: Family, name: str, block: nn.Module) -> bool:
    return any(family.marks.search(f"{name}.0.{child}.") for child, _ in block.named_modules())


def family_of(model: nn.Module) -> Family | None:
    """The family of a model with nunchaku's quantized layers in it, else None."""
    try:
        root, family = locate(model)
    except PlanError:
        return None
    return family if any(holds_low_rank(module) for module in root.modules()) else None
