"""How much of a delta would survive being baked into a weight: predicted, before anything is computed.

ComfyUI requantizes with stochastic rounding: what it applies is right on average, and noise around it. The
*kept share* is the cosine between the change that was applied and the one that was wanted, so noise counts
against it: 1.0 is all of it, and at 0.95 the noise is a third of the delta.

For a value on the grid of its format (step D) and a Gaussian delta of rms s, stochastic rounding leaves the
mean square error D^2 E[f (1 - f)], f the fractional part of delta / D. As a Fourier series of the parabola:
E[f (1 - f)] = 1/6 - sum over k of exp(-2 pi^2 k^2 s^2 / D^2) / (pi^2 k^2).
A block format that chooses new scales leaves no value on its old grid: then it is 1/6.
"""

from __future__ import annotations

import math

from qpatch.lora import lowrank

from . import steps
from .splitting import Placed


def share(step: float, delta: float, on_grid: bool) -> float:
    """The kept share of a delta of rms ``delta`` in a weight whose steps have the rms ``step``."""
    if delta == 0:
        return 1.0
    noise = step * step * _fraction(delta / step if step else math.inf, on_grid)
    return 1.0 / math.sqrt(1.0 + noise / (delta * delta))


def _fraction(ratio: float, on_grid: bool) -> float:
    if not on_grid or ratio > 1:
        return 1 / 6
    ripple = sum(math.exp(-2 * (math.pi * k * ratio) ** 2) / k**2 for k in range(1, 200))
    return max(1 / 6 - ripple / math.pi**2, 0.0)


def predict(tensor, norm: float, elements: int) -> float | None:
    """The kept share of a change of Frobenius norm ``norm`` on ``elements`` elements of the weight ``tensor``.

    None where the format is not known. A format that can only be made offline keeps nothing: it cannot be baked.
    """
    found = steps.of(tensor)
    if found is None:
        return None
    return share(found.rms, norm / math.sqrt(elements), found.on_grid) if found.rms != math.inf else 0.0


def of_terms(tensor, placed: list[Placed]) -> float | None:
    """The kept share of what ``placed`` adds to the weight ``tensor`` in sum."""
    areas = {(one.rows.start, one.rows.stop, one.columns.start, one.columns.stop): [] for one in placed}
    for one in placed:
        area = one.rows.start, one.rows.stop, one.columns.start, one.columns.stop
        scaled = type(one.term)(one.term.up, one.term.down, one.term.scale * one.strength)
        areas[area].append(scaled)
    norm = math.sqrt(sum(lowrank.norm(terms) ** 2 for terms in areas.values()))
    elements = sum((bottom - top) * (right - left) for top, bottom, left, right in areas)
    return predict(tensor, norm, min(elements, tensor.shape[0] * tensor.shape[1]))
