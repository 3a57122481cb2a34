"""The strategy: a valid file of some trainer, changed a few times, sometimes damaged, and what is asked for it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from hypothesis import strategies as st

from . import changes, container
from .tensors import SPELLINGS, Contents, example


@dataclass(frozen=True)
class Case:
    """``content`` of the file; ``model`` (of harness.MODELS), ``strength`` and options of the composition.

    ``beside``: the file is the second of a stack whose first is good.
    """

    content: bytes
    model: int
    strength: float
    metadata_alpha: bool
    trainer: bool
    beside: bool

    def __repr__(self):
        return (f"Case({self.content!r}, model={self.model}, strength={self.strength!r}, "
                f"metadata_alpha={self.metadata_alpha}, trainer={self.trainer}, beside={self.beside})")


_FAMILIES = {family: st.sampled_from([one for one in SPELLINGS if one[1] == family])
             for family in ("qwen-image", "z-image")}
_FAMILY = st.sampled_from(list(_FAMILIES))
_CHANGES = st.lists(st.sampled_from(changes.CHANGES), max_size=3)
_DAMAGE = st.sampled_from((*[None] * 2 * len(container.DAMAGES), *container.DAMAGES))
_STRENGTH = st.sampled_from((1.0, 1.0, -0.5, 0.0, 3e4, 1e-30, 1e38, 1e300))
# A file for the other family is one of the things to be refused, but not half of them.
_MODEL = {"qwen-image": st.sampled_from((*(0, 1) * 5, *range(4))), "z-image": st.sampled_from((*(2, 3) * 5, *range(4)))}
_OPTIONS = st.tuples(st.booleans(), st.booleans(), st.sampled_from((False, False, False, True)))


@functools.cache
def _stems(spelling):
    groups, _ = example(*spelling)
    return st.lists(st.sampled_from(list(groups)), min_size=1, max_size=4, unique=True)


@st.composite
def cases(draw) -> Case:
    """Mostly files with one to three things wrong: more of it rarely gets past the first check."""
    family = draw(_FAMILY)
    spelling = draw(_FAMILIES[family])
    groups, metadata = example(*spelling)
    stems = draw(_stems(spelling))
    contents = Contents({key: stored for stem in stems for key, stored in groups[stem].items()}, metadata or None)
    for change in draw(_CHANGES):
        change(draw, contents)
    table, data = container.table_of(contents)
    damage = draw(_DAMAGE)
    content = container.whole(table, data) if damage is None else damage(draw, table, data)
    return Case(content, draw(_MODEL[family]), draw(_STRENGTH), *draw(_OPTIONS))
