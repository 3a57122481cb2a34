"""Every producer, every kind of adapter: the change equals independent dense float64 code."""

import dense_reference
import numpy as np
import producers
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from qpatch.lora import adapters, lowrank
from qpatch.lora.errors import ShapeError
from qpatch.lora.files import open_lora
from qpatch.lora.keys import Role, Target
from qpatch.lora.rules import Rules

TARGET = Target("transformer_blocks.0.attn.to_out.0")

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
            check_bias(delta, sample, base[:, 0], strength)


def check_bias(delta, sample, bias, strength):
    assert (delta.bias is None and delta.rebias is None) == (sample.bias is None)
    if delta.bias is not None:
        assert_close(strength * delta.bias.double().numpy(), sample.bias(bias, strength))
    if delta.rebias is not None:
        changed = delta.rebias(torch.from_numpy(bias).float(), strength)
        assert_close(changed.double().numpy(), sample.bias(bias, strength))


def build(kind, out, inp, rank=3, alpha=1.5, seed=0, dtype=torch.float32, **options):
    """(adapter, sample, base) of one layer in memory."""
    rng = np.random.default_rng(seed)
    store = lambda array: torch.from_numpy(np.asarray(array)).to(dtype)
    sample = dense_reference.KINDS[kind](rng, out, inp, rank, alpha, store)
    tensors = {Role(role): tensor for role, tensor in sample.tensors.items()}
    return adapters.build(TARGET, tensors, **options), sample, rng.normal(size=(out, inp))


@settings(max_examples=200, deadline=None)
@given(kind=st.sampled_from(sorted(dense_reference.KINDS)), out=st.sampled_from([2, 4, 6, 8, 12, 16]),
       inp=st.sampled_from([2, 3, 6, 8, 9]), rank=st.integers(1, 7), alpha=st.sampled_from([None, 0.5, 1.0, 16.0]),
       strength=st.sampled_from([1.0, 0.0, -1.0, 0.3, 25.0]), seed=st.integers(0, 2**32 - 1),
       dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]))
def test_every_kind_in_any_size_rank_alpha_and_dtype(kind, out, inp, rank, alpha, strength, seed, dtype):
    # With a rank as large as the layer, the two layouts of GLoRA cannot be told apart.
    assume(not kind.startswith("glora") or rank < min(out, inp))
    convention = "trainer" if kind.endswith("trainer") else "comfyui"
    adapter, sample, base = build(kind, out, inp, rank, alpha, seed, dtype, rules=Rules(convention))
    delta = adapter.delta()
    assert adapter.misfit(out, inp) is None
    if sample.change is not None:
        expected = sample.change(base, strength)
        # The change of a rotation is a difference of numbers of the base's size.
        size = np.linalg.norm(expected) + abs(strength) * np.linalg.norm(base)
        assert np.linalg.norm(change_of(delta, base, strength) - expected) <= 1e-5 * size
    check_bias(delta, sample, base[:, 0], strength or 1.0)


@pytest.mark.parametrize("kind, exact_rank", [("lokr_full", 144), ("lokr", 12 * 11), ("loha", 144)])
def test_a_high_exact_rank_stays_structured_until_it_is_truncated(kind, exact_rank):
    adapter, sample, base = build(kind, 144, 180, rank=11 if kind == "lokr" else 12, alpha=None)
    delta = adapter.delta()
    dense = sample.change(base, 1.0)
    assert not delta.terms and delta.dense.exact_rank == exact_rank and delta.dense.shape == (144, 180)
    assert_close(change_of(delta, base, 1.0), dense)
    terms, error = lowrank.truncate(delta.dense, exact_rank)
    assert error == 0.0 and sum(term.rank for term in terms) == exact_rank
    terms, error = lowrank.truncate(delta.dense, 64)
    left_over = lowrank.to_dense(terms).double().numpy() - dense
    assert error == pytest.approx(np.linalg.norm(left_over) / np.linalg.norm(dense), rel=1e-3)


@pytest.mark.parametrize("kind, rank, expected", [
    ("lokr", 4, 4 * 6), ("lokr_both", 3, 9), ("lokr_w2_whole", 4, 4 * 6), ("lokr_full", 4, 36), ("loha", 4, 16),
])
def test_the_factors_of_products_have_the_smallest_exact_rank(kind, rank, expected):
    adapter, _, _ = build(kind, 36, 48, rank)
    (term,) = adapter.delta().terms
    assert term.rank == expected


def test_a_base_weight_is_not_written_to():
    for kind in dense_reference.KINDS:
        adapter, _, base = build(kind, 12, 12)
        delta, weight = adapter.delta(), torch.from_numpy(base).float()
        before = weight.clone()
        if delta.rebase is not None:
            delta.rebase(weight, 0.7)
        assert torch.equal(weight, before)


@pytest.mark.parametrize("kind", sorted(dense_reference.KINDS))
def test_a_change_of_the_base_is_computed_where_the_base_is(kind):
    delta = build(kind, 12, 12)[0].delta()
    if delta.rebase is not None:
        result = delta.rebase(torch.empty(12, 12, device="meta"), 0.7)
        assert lowrank.to_dense(result).device.type == "meta"
    if delta.rebias is not None:
        assert delta.rebias(torch.empty(12, device="meta"), 0.7).device.type == "meta"


class Largest(TorchFunctionMode):
    """Number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_function__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("kind", ["lora", "lokr", "lokr_both", "lokr_full", "loha"])
def test_the_change_of_a_product_is_made_without_a_matrix_of_the_layers_size(kind):
    size = 1024
    adapter, _, _ = build(kind, size, size, rank=3)
    with Largest() as largest:
        delta = adapter.delta()
        lowrank.truncate(delta.terms if delta.dense is None else delta.dense, 128)
    assert 0 < largest.elements <= size * size / 2


@pytest.mark.parametrize("kind, wrong, said", [
    ("lora", (8, 6), "transposed"), ("lora", (7, 9), "another size"), ("lokr", (7, 9), "another size"),
    ("oft", (8, 8), "6 rows"), ("peft_oft", (6, 9), "8 columns"), ("ia3_rows", (8, 8), "6 factors"),
    ("ia3_columns", (6, 9), "8 factors"), ("peft_ia3", (7, 8), "6 factors"), ("peft_ia3_ffn", (6, 9), "8 factors"),
    ("diff_b", (7, 8), "6 rows"),
])
def test_a_layer_of_another_size_says_what_does_not_fit(kind, wrong, said):
    adapter, _, _ = build(kind, 6, 8)
    assert adapter.misfit(6, 8) is None
    assert said in adapter.misfit(*wrong)


@pytest.mark.parametrize("tensors, said", [
    ({"hada_w1_a": (6, 2), "hada_w1_b": (3, 8), "hada_w2_a": (6, 2), "hada_w2_b": (2, 8)},
     "ranks of hada_w1_a and hada_w1_b"),
    ({"hada_w1_a": (6, 2), "hada_w1_b": (2, 8), "hada_w2_a": (6, 2), "hada_w2_b": (2, 9)}, "different sizes"),
    ({"lokr_w1": (2, 2), "lokr_w2_a": (3, 2), "lokr_w2_b": (3, 4)}, "ranks of lokr_w2_a and lokr_w2_b"),
    ({"lokr_w1": (2, 2, 3, 3), "lokr_w2": (3, 4)}, "not a matrix"),
    ({"glora_a1": (8, 2), "glora_a2": (2, 8), "glora_b1": (6, 3), "glora_b2": (2, 8)}, "do not fit each other"),
    ({"oft_blocks": (2, 3, 4)}, "not square"),
    ({"oft_blocks": (3, 3)}, "not square"),
    ({"oft_blocks": (2, 3, 3), "rescale": (5, 1)}, "rescale does not fit"),
    ({"oft_blocks": (2, 3, 3, 3)}, "butterfly"),
    ({"oft_blocks": (4, 4, 2, 2)}, "butterfly"),
    ({"oft_r": (2, 5)}, "no triangle"),
    ({"ia3_weight": (2, 3), "ia3_on_input": ()}, "not a vector"),
    ({"ia3_l": (2, 3)}, "not a vector"),
    ({"down": (2, 8), "up": (6, 2), "dora": (7, 1)}, "magnitude fits neither"),
    ({"down": (2, 8), "up": (6, 2), "dora": (8,)}, "magnitude fits neither"),
    ({"down": (2, 8), "up": (6, 2), "diff_b": (7,)}, "bias does not fit"),
    ({"down": (2, 8), "up": (6, 2), "up_bias": (6, 1)}, "bias does not fit"),
    ({"diff": (2, 3, 4)}, "not a matrix"),
    ({"diff": (0,)}, "not a matrix"),
    ({"diff": (4,), "w_norm": (4,)}, "both diff and w_norm"),
])
def test_tensors_that_do_not_fit_each_other_are_refused(tensors, said):
    made = {Role(role): torch.zeros(shape) for role, shape in tensors.items()}
    with pytest.raises(ShapeError, match=said) as caught:
        adapters.build(TARGET, made, file="x.safetensors")
    assert caught.value.file == "x.safetensors" and caught.value.key in tensors


def test_alpha_may_be_given_as_a_number():
    adapter = adapters.build(TARGET, {Role.down: torch.ones(4, 8), Role.up: torch.ones(6, 4)}, alpha=2)
    assert adapter.scale == 0.5


def test_one_magnitude_per_row_is_meant_where_rows_and_columns_are_as_many():
    """ComfyUI multiplies the columns of a square layer by PEFT's 1-D magnitude; its trainers mean rows."""
    adapter, sample, base = build("dora_flat", 8, 8)
    assert_close(change_of(adapter.delta(), base, 1.0), sample.change(base, 1.0))


def test_a_square_glora_of_a_rank_above_its_size_is_read_by_the_size_of_the_base():
    adapter, sample, base = build("glora", 4, 4, rank=6)
    assert adapter.misfit(4, 4) is None
    assert_close(change_of(adapter.delta(), base, 0.5), sample.change(base, 0.5))


def test_the_note_says_which_rule_was_followed():
    assert build("dora", 6, 8)[0].delta().note == "alpha 1.5 / rank 3; DoRA, norm of the base weight per row"
    assert "changed weight per row" in build("dora", 6, 8, rules=Rules("trainer"))[0].delta().note
    assert "norm of Q at most 1.5" in build("oft", 6, 8)[0].delta().note
    assert "norm of Q at most 9" in build("oft", 6, 8, rules=Rules("trainer"))[0].delta().note
    assert "alpha has no meaning" in build("lokr_full", 6, 8)[0].delta().note
