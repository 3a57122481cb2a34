"""Each kind of adapter by itself, against the dense change. Slow: CI only runs the file that mixes them."""

import pytest

from .cases import FULL_RANK, Restoring, load
from .effect import FAMILIES, TOLERANCE, example


class KindCases(Restoring):
    """Needs a fixture ``pairs`` (see cases.Restoring)."""

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("kind", FULL_RANK)
    def test_an_adapter_without_a_small_rank_is_right_within_the_rank_budget(self, pairs, family, kind, monkeypatch):
        monkeypatch.setenv("QPATCH_MAX_RANK", "900")
        pair, file = pairs(family), example(family, "simpletuner lycoris", kind)
        assert pair.error(load(pair.quantized, file, FULL_RANK[kind]), [(file, FULL_RANK[kind])]) < TOLERANCE
