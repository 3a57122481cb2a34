"""What is written of one layer: an adapter as it is, or the factors of its change, exact or approximated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import adapters, lowrank
from ..adapters import Adapter
from ..adapters.dora import magnitude_axis
from ..errors import NonFiniteError, UnsupportedAdapter
from ..keys import Role, Target
from ..products import inner, part_of, part_of_terms
from ..stack import kind_of
from ..terms import Term
from .formats import Format

#: Kinds whose alpha is divided by their rank, and nothing else.
_PLAIN = "lora"


@dataclass
class Entry:
    """One layer of the output.

    ``tensors``  role -> tensor, without alpha.
    ``scale``    of ``up @ down``; for other kinds 1, and ``alpha`` is written as the file had it.
    ``norm``     of the change, where it was needed; ``error``: norm of what an approximation left out.
    ``rounded``  whether the factors are products of other factors, rounded to float32.
    """

    target: Target
    kind: str
    tensors: dict[Role, torch.Tensor]
    scale: float = 1.0
    alpha: float | None = None
    norm: float | None = None
    error: float = 0.0
    rounded: bool = False

    @property
    def rank(self) -> int:
        return self.tensors[Role.down].shape[0]

    def terms(self) -> tuple[Term, ...]:
        """The change of an entry of kind "lora"."""
        return (Term(self.tensors[Role.up], self.tensors[Role.down], self.scale),)


def entry_of(adapter: Adapter, format: Format, max_rank: int | None = None) -> Entry:
    """The entry for one adapter of a file: as it is where the format can hold that, else as factors.

    ``max_rank`` replaces factors of a higher rank, and whatever has none, by the best approximation of that rank.
    Raises :class:`UnsupportedAdapter` where neither can be done.
    """
    reducible = max_rank is not None and _reducible(adapter, max_rank)
    if format.holds(adapter.kind) and not reducible:
        return _kept(adapter, format)
    if adapter.kind == "bias":
        raise refusal(adapter, f"the {format.name} format has no place for the change of a bias")
    delta = adapter.delta()
    if delta.rebase is not None or delta.replace is not None:
        raise refusal(adapter, _needs_base(kind_of(adapter), format))
    if len(adapter.shape) == 1:
        raise refusal(adapter, f"the {format.name} format has no place for the change of a norm")
    entry = approximated(adapter.target, delta.terms if delta.dense is None else delta.dense, max_rank)
    if entry is None:
        raise refusal(adapter, f"{kind_of(adapter)} without a small exact rank cannot be held by the {format.name}"
                               " format; --rank N writes its best approximation of rank N")
    _add_bias(entry, delta.bias)
    entry.rounded = adapter.kind != _PLAIN
    return entry


def _needs_base(kind: str, format: Format) -> str:
    return f"{kind} depends on the base weight; the {format.name} format holds low-rank factors only"


def refusal(adapter: Adapter, reason: str) -> UnsupportedAdapter:
    return UnsupportedAdapter(reason, file=adapter.file, key=adapter.key)


def _reducible(adapter: Adapter, max_rank: int) -> bool:
    """Whether the adapter is to be replaced by factors of at most ``max_rank``."""
    if Role.dora in adapter.keys or adapter.shape is None or len(adapter.shape) == 1:
        return False
    return adapter.kind in ("lokr", "loha", "diff") or (adapter.kind == _PLAIN and adapter.rank > max_rank)


def _kept(adapter: Adapter, format: Format) -> Entry:
    layer = adapter.layer
    tensors = {role: layer.tensor(role) for role in adapter.keys if role not in (Role.alpha, Role.scale)}
    if adapter.kind == _PLAIN:
        tensors |= {role: layer.matrix(role) for role in (Role.down, Role.up)}
        return _with_extras(Entry(adapter.target, adapter.kind, tensors, adapter.scale), adapter, format)
    rules = layer.rules
    if Role.scale in adapter.keys or rules.rslora or rules.config is not None:
        raise refusal(adapter, f"the scale of this {adapter.kind} is not from its own alpha, and a file says no other")
    return Entry(adapter.target, adapter.kind, tensors, alpha=adapter.alpha)


def _with_extras(entry: Entry, adapter: Adapter, format: Format) -> Entry:
    """A bias and a magnitude beside plain factors, in the form in which the format has them, or refused."""
    tensors = entry.tensors
    if Role.dora in tensors:
        _fit_magnitude(tensors, adapter, format)
    if Role.up_bias in tensors and Role.up_bias not in format.suffixes:
        (change,) = scaled(entry.target, [tensors.pop(Role.up_bias)], [entry.scale])
        tensors[Role.diff_b] = change + tensors[Role.diff_b] if Role.diff_b in tensors else change
    if format.diffusers and not tensors.keys().isdisjoint({Role.diff_b, Role.b_norm}):
        raise refusal(adapter, f"the {format.name} format has no place for the change of a bias")
    return entry


def _fit_magnitude(tensors, adapter: Adapter, format: Format) -> None:
    if format.fuses:
        raise refusal(adapter, _needs_base("DoRA", format))
    magnitude, by_row = tensors[Role.dora], magnitude_axis(adapter.layer, adapter.shape) == 1
    if format.diffusers and not by_row:
        raise refusal(adapter, "this DoRA scales columns; the diffusers format has a magnitude for rows only")
    if by_row:
        tensors[Role.dora] = magnitude.reshape(-1) if format.diffusers else magnitude.reshape(-1, 1)


def approximated(target: Target, change, max_rank: int | None) -> Entry | None:
    """An entry of factors for a change: exact if its rank is small, else the best of ``max_rank``; None without one."""
    if isinstance(change, tuple) and (max_rank is None or sum(term.rank for term in change) <= max_rank):
        return _pair(target, change)
    if max_rank is None:
        return None
    terms, _ = lowrank.truncate(change, max_rank)
    entry, like = _pair(target, terms), change[0].up if isinstance(change, tuple) else change
    if isinstance(like, torch.Tensor):
        entry.tensors = {role: tensor.to(like.dtype) for role, tensor in entry.tensors.items()}
    measure_error(entry, change)
    return entry


def _pair(target: Target, terms: Sequence[Term]) -> Entry:
    """Terms as one pair of factors and their common scale; where the scales differ they go into ``up``."""
    ups, downs = [term.up for term in terms], [term.down for term in terms]
    scales = {term.scale for term in terms}
    if len(scales) == 1:
        return Entry(target, _PLAIN, {Role.down: _joined(downs, 0), Role.up: _joined(ups, 1)}, scales.pop())
    ups = scaled(target, ups, [term.scale for term in terms])
    entry = Entry(target, _PLAIN, {Role.down: _joined(downs, 0), Role.up: _joined(ups, 1)})
    exact = torch.cat([term.up.double() * term.scale for term in terms], dim=1)
    entry.error = _rounding(exact, entry.tensors[Role.down], entry)
    return entry


def _joined(tensors, dim: int) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=dim)


def _rounding(up: torch.Tensor, down: torch.Tensor, entry: Entry) -> float:
    """Norm of ``up @ down`` minus what the entry has, U D - U' D' = (U - U') D + U' (D - D'), which cancels nothing."""
    given_up, given_down = entry.tensors[Role.up], entry.tensors[Role.down]
    lost = part_of_terms([Term(up.double() - given_up.double(), down),
                          Term(given_up, down.double() - given_down.double())])
    return abs(entry.scale) * math.sqrt(max(inner([lost], [lost]), 0.0))


def scaled(target: Target, tensors: Sequence[torch.Tensor], scales: Sequence[float]) -> list[torch.Tensor]:
    """Each tensor times its scale: in its own dtype where that is exact for all of them, else in float32."""
    exact = [tensor.double() * scale for tensor, scale in zip(tensors, scales)]
    kept = [product.to(tensor.dtype) for product, tensor in zip(exact, tensors)]
    if all(torch.equal(small.double(), product) for small, product in zip(kept, exact)):
        return kept
    rounded = [product if tensor.dtype == torch.float64 else product.float() for product, tensor in zip(exact, tensors)]
    if not all(torch.isfinite(tensor).all() for tensor in rounded):
        raise NonFiniteError("the factors are too large for float32 at this scale", key=str(target))
    return rounded


def fold(entry: Entry) -> None:
    """Multiply the scale into ``up`` (and a bias that it scales), for what cannot be written with an alpha."""
    if entry.scale == 1:
        return
    up, down = entry.tensors[Role.up].double() * entry.scale, entry.tensors[Role.down]
    roles = [role for role in (Role.up, Role.up_bias) if role in entry.tensors]
    products = scaled(entry.target, [entry.tensors[role] for role in roles], [entry.scale] * len(roles))
    entry.tensors |= dict(zip(roles, products))
    entry.scale = 1.0
    entry.error = math.hypot(entry.error, _rounding(up, down, entry))


def cast(entry: Entry, dtype: torch.dtype) -> None:
    """Round the factors of an entry to ``dtype``; refuses what becomes infinite, and counts the rounding as error."""
    before = {role: tensor for role, tensor in entry.tensors.items() if tensor.is_floating_point() and tensor.dim()}
    rounded = {role: tensor.to(dtype) for role, tensor in before.items()}
    for role, tensor in rounded.items():
        if not torch.isfinite(tensor).all():
            raise UnsupportedAdapter(f"{role} of {entry.target} is too large for {dtype}: use another precision")
    if all(torch.equal(rounded[role].double(), tensor.double()) for role, tensor in before.items()):
        entry.tensors |= rounded
        return
    earlier = entry.error
    # Truncation and rounding are at about right angles to each other.
    if entry.kind == _PLAIN:
        entry.tensors |= rounded
        entry.error = math.hypot(earlier, _rounding(before[Role.up], before[Role.down], entry))
        return
    exact = _parts(entry)
    entry.tensors |= rounded
    if exact is not None:
        _set_error(entry, exact)
        entry.error = math.hypot(earlier, entry.error)


def measure_error(entry: Entry, change) -> None:
    """Set ``norm`` of ``change`` and the norm of what the entry lacks of it, in float64."""
    _set_error(entry, [part_of_terms(change) if isinstance(change, tuple) else part_of(1.0, change)])


def _set_error(entry: Entry, exact) -> None:
    given, square = _parts(entry), inner(exact, exact)
    entry.norm = math.sqrt(max(square, 0.0))
    apart = square - 2 * inner(exact, given) + inner(given, given)
    entry.error = math.sqrt(apart) if apart > 1e-15 * square else 0.0


def _parts(entry: Entry):
    """The change of an entry as products.py takes it; None where it depends on the base weight."""
    if entry.kind == _PLAIN:
        return [part_of_terms(entry.terms())]
    delta = adapters.build(entry.target, entry.tensors, alpha=entry.alpha).delta()
    if delta.rebase is not None or delta.replace is not None:
        return None
    if delta.dense is not None:
        return [part_of(1.0, delta.dense)]
    return [part_of_terms(delta.terms)] if delta.terms else []


def _add_bias(entry: Entry, bias: torch.Tensor | None) -> None:
    if bias is not None:
        entry.tensors[Role.diff_b] = bias
