"""Every producer, every kind of adapter: the change equals independent dense float64 code."""

import numpy as np
import producers
import pytest
import torch

from qpatch.lora import lowrank
from qpatch.lora.files import open_lora

CASES = [(name, family, kind) for name, rules in producers.PRODUCERS.items() for family in rules.families
         for kind in rules.kinds]


def change_of(delta, base, strength):
    """What ``delta`` does to ``base`` at ``strength``, dense float64."""
    if delta.rebase is not None:
        result = lowrank.to_dense(delta.rebase(torch.from_numpy(base).float(), strength))
        return result.double().numpy()
    if delta.replace is not None:
        return strength * (delta.replace.double().numpy() - base)
    result = np.zeros(base.shape)
    for term in delta.terms:
        result = result + term.scale * term.up.double().numpy() @ term.down.double().numpy()
    if delta.dense is not None:
        result = result + lowrank.to_dense(delta.dense).double().numpy()
    return strength * result


def assert_close(found, expected, tolerance=2e-6):
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("producer, family, kind", CASES)
def test_every_layer_of_every_producer_equals_the_dense_reference(producer, family, kind):
    example = producers.make(producer, family, kind, rank=3, alpha=1.5)
    convention = "trainer" if kind.endswith("trainer") else "comfyui"
    file = open_lora(example.tensors, convention=convention)
    assert {str(target) for target in file.layers} == set(example.layers)
    assert not file.unknown
    for target, adapter in file.layers.items():
        sample, base, delta = example.layers[str(target)], example.base(str(target)), adapter.delta()
        assert adapter.shape in (example.shapes[str(target)], None)
        for strength in (1.0, -0.7):
            if sample.change is not None:
                assert_close(change_of(delta, base, strength), sample.change(base, strength))
            assert (delta.bias is None and delta.rebias is None) == (sample.bias is None)
