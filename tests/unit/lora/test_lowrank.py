"""Low-rank algebra against numpy's dense float64 linear algebra."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qpatch.lora import lowrank
from qpatch.lora.structured import Hadamard, Kronecker, Structured
from qpatch.lora.terms import Term

SMALL = st.integers(1, 9)
SEEDS = st.integers(0, 2**32 - 1)


def normal(seed, *shapes, dtype=torch.float32):
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.normal(size=shape)).to(dtype) for shape in shapes]


def f64(tensor):
    return tensor.double().numpy()


def product(terms):
    return sum(term.scale * f64(term.up) @ f64(term.down) for term in terms)


def best_error(dense, rank):
    """Relative error of the best approximation of that rank (Eckart, Young)."""
    values = np.linalg.svd(dense, compute_uv=False)
    return np.linalg.norm(values[rank:]) / np.linalg.norm(values)


def mass(change):
    """What the products would come to if nothing cancelled: float32 rounds relative to this, not to the sum."""
    if isinstance(change, torch.Tensor):
        return np.linalg.norm(f64(change))
    terms = change.terms() if isinstance(change, Structured) else change
    return sum(np.linalg.norm(abs(term.scale) * abs(f64(term.up)) @ abs(f64(term.down))) for term in terms)


def check_truncation(change, dense, rank, slack=1e-5):
    """The terms are near the best, and the stated error is their true one."""
    terms, error = lowrank.truncate(change, rank)
    assert sum(term.rank for term in terms) <= rank or error == 0.0
    norm = np.linalg.norm(dense)
    true = np.linalg.norm(product(terms) - dense) / norm
    rounding = 2e-6 * max(1.0, mass(change) / norm)
    assert true == pytest.approx(error, abs=rounding, rel=1e-4)
    assert error <= best_error(dense, rank) * (1 + slack) + rounding


@given(SEEDS, SMALL, SMALL, st.lists(SMALL, min_size=1, max_size=4), st.floats(-3, 3))
def test_norm_of_terms_is_that_of_their_sum(seed, out, inp, ranks, scale):
    terms = [Term(*normal((seed, index), (out, rank), (rank, inp)), scale + index) for index, rank in enumerate(ranks)]
    dense = product(terms)
    assert lowrank.norm(terms) == pytest.approx(np.linalg.norm(dense), rel=1e-4, abs=1e-4)
    assert np.allclose(f64(lowrank.to_dense(terms)), dense, rtol=1e-4, atol=1e-4)
    assert lowrank.norm(terms[0]) == pytest.approx(np.linalg.norm(product(terms[:1])), rel=1e-4, abs=1e-4)


@given(SEEDS, SMALL, SMALL, st.lists(SMALL, min_size=1, max_size=4), SMALL)
def test_compress_is_the_best_sum_of_that_rank_and_says_its_error(seed, out, inp, ranks, budget):
    terms = [Term(*normal((seed, index), (out, rank), (rank, inp))) for index, rank in enumerate(ranks)]
    check_truncation(terms, product(terms), budget)


def test_terms_within_the_budget_come_back_as_they_are():
    terms = (Term(*normal(0, (6, 2), (2, 5))), Term(*normal(1, (6, 3), (3, 5)), 0.5))
    compressed, error = lowrank.compress(terms, 5)
    assert compressed == terms and error == 0.0


def test_terms_that_cancel_compress_to_nothing():
    up, down = normal(0, (6, 2), (2, 5))
    (term,), error = lowrank.compress((Term(up, down, 1.0), Term(up, down, -1.0)), 2)
    assert np.linalg.norm(product([term])) < 1e-5 * lowrank.norm(Term(up, down))


@pytest.mark.parametrize("shape", [(300, 700), (700, 300), (600, 600)])
@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_dense_matrix_is_truncated_to_within_a_percent_of_the_best(shape, decay):
    (dense,) = normal(1, shape)
    left, values, right = np.linalg.svd(f64(dense), full_matrices=False)
    dense = torch.from_numpy((left * values * np.arange(1, len(values) + 1) ** -decay) @ right).float()
    for rank in (1, 20, 60):
        check_truncation(dense, f64(dense), rank, slack=0.01)


@given(SEEDS, SMALL, SMALL, SMALL)
def test_small_dense_matrix_is_truncated_as_well_as_possible(seed, out, inp, rank):
    (dense,) = normal(seed, (out, inp))
    check_truncation(dense, f64(dense), rank)


def test_matrix_of_low_rank_is_found_exactly():
    up, down = normal(0, (700, 8), (8, 600))
    terms, error = lowrank.truncate(up @ down, 8)
    assert error < 1e-5 and np.allclose(product(terms), f64(up @ down), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dense_matrix_may_have_any_float_dtype(dtype):
    (dense,) = normal(3, (40, 30), dtype=dtype)
    check_truncation(dense, f64(dense), 10)


def factor(seed, rows, columns, rank):
    """A factor of a Kronecker product: whole for rank 0, else a pair."""
    if rank == 0:
        return normal(seed, (rows, columns))[0]
    return tuple(normal(seed, (rows, rank), (rank, columns)))


@settings(max_examples=150)
@given(SEEDS, st.tuples(SMALL, SMALL, SMALL, SMALL), st.integers(0, 4), st.integers(0, 4), st.integers(1, 30))
def test_kronecker_product_by_factors(seed, extents, rank1, rank2, budget):
    a, b, c, d = extents
    w1, w2 = factor((seed, 1), a, b, rank1), factor((seed, 2), c, d, rank2)
    change = Kronecker(w1, w2, 0.7)
    m1, m2 = (f64(w) if isinstance(w, torch.Tensor) else f64(w[0]) @ f64(w[1]) for w in (w1, w2))
    dense = 0.7 * np.kron(m1, m2)
    r1, r2 = min(rank1 or 99, a, b), min(rank2 or 99, c, d)
    assert change.shape == dense.shape and change.exact_rank == r1 * r2
    (term,) = change.terms()
    assert term.rank == r1 * r2 and np.allclose(product([term]), dense, rtol=1e-4, atol=1e-4)
    assert lowrank.norm(change) == pytest.approx(np.linalg.norm(dense), rel=1e-5)
    start = seed % dense.shape[0]
    assert np.allclose(f64(change.rows(start, dense.shape[0])), dense[start:], rtol=1e-4, atol=1e-4)
    check_truncation(change, dense, budget)


@settings(max_examples=100)
@given(SEEDS, SMALL, SMALL, st.integers(1, 4), st.integers(1, 4), st.integers(1, 20))
def test_hadamard_product_by_factors(seed, out, inp, rank1, rank2, budget):
    a1, b1, a2, b2 = normal(seed, (out, rank1), (rank1, inp), (out, rank2), (rank2, inp))
    change = Hadamard(a1, b1, a2, b2, -1.3)
    dense = -1.3 * (f64(a1) @ f64(b1)) * (f64(a2) @ f64(b2))
    (term,) = change.terms()
    assert term.rank == change.exact_rank == rank1 * rank2
    assert np.allclose(product([term]), dense, rtol=1e-3, atol=1e-4)
    assert lowrank.norm(change) == pytest.approx(np.linalg.norm(dense), rel=1e-4, abs=1e-5 * mass([term]))
    check_truncation(change, dense, budget, slack=1e-4)


def test_exact_products_of_16_bit_factors_lose_nothing():
    """A product of two bfloat16 numbers fits into float32, so the factors of a LoKr in bfloat16 are exact."""
    w1, w2 = normal(0, (4, 4), (5, 5), dtype=torch.bfloat16)
    assert np.array_equal(product(Kronecker(w1, w2).terms()), np.kron(f64(w1), f64(w2)))


@pytest.mark.parametrize("change", [
    Kronecker(*normal(0, (8, 8), (96, 96))),
    Kronecker(*normal(0, (3, 2), (400, 300))),
    Hadamard(*normal(0, (700, 20), (20, 600), (700, 20), (20, 600))),
], ids=["balanced", "unbalanced", "hadamard"])
def test_structured_change_is_truncated_without_being_built(change, monkeypatch):
    dense = f64(change.rows(0, change.shape[0]))
    asked, rows = [], type(change).rows

    def counted(self, start, stop):
        asked.append(stop - start)
        return rows(self, start, stop)

    monkeypatch.setattr(type(change), "rows", counted)
    check_truncation(change, dense, 64, slack=0.01)
    assert all(count <= lowrank.BLOCK for count in asked) and change.shape[0] > lowrank.BLOCK


def test_results_do_not_depend_on_torchs_random_state():
    (dense,) = normal(0, (600, 600))
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        (term,), error = lowrank.truncate(dense, 20)
        results.append((term.up, term.down, error))
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


def test_a_change_of_zeros_has_no_error():
    terms, error = lowrank.truncate(torch.zeros(20, 30), 4)
    assert error == 0.0 and np.all(product(terms) == 0)
    assert lowrank.norm(()) == 0.0


def test_a_rank_below_one_is_a_value_error():
    for function in (lowrank.truncate, lowrank.compress):
        with pytest.raises(ValueError, match="positive"):
            function((Term(*normal(0, (3, 2), (2, 3))),), 0)
