"""Singular values of terms and their leading parts, against numpy's SVD of the dense product in float64."""

import numpy as np
import pytest
import torch

from qpatch.lora import NonFiniteError
from qpatch.lora.spectrum import spectrum
from qpatch.lora.terms import Term

#: (out, rank, in): of fewer ranks than the matrix has singular values, as many, more; tall, wide and square.
SIZES = [(96, 20, 64), (64, 20, 96), (50, 1, 40), (96, 64, 64), (64, 64, 96), (80, 500, 48), (48, 500, 80),
         (60, 200, 60), (700, 90, 30)]


def term(size, decay=1.0, dtype=torch.float32, scale=-0.5, seed=0):
    out, rank, inp = size
    generator = torch.Generator().manual_seed(seed)
    up, down = (torch.randn(shape, generator=generator) * 0.1 for shape in ((out, rank), (rank, inp)))
    return Term((up * decay ** torch.arange(rank)).to(dtype), down.to(dtype), scale)


def dense(term):
    return term.scale * (term.up.double().numpy() @ term.down.double().numpy())


def check(of, rank, tolerance=1e-5):
    """The leading part is the best one of its rank, and the energies that it leaves are those that it really leaves."""
    matrix, found = dense(of), spectrum(of, rank)
    values = np.linalg.svd(matrix, compute_uv=False)
    whole = np.linalg.norm(values)
    assert np.allclose(found.energies.sqrt(), values[:len(found.energies)], atol=5e-4 * values[0])
    part = found.leading(rank)
    assert part.rank == rank and part.shape == of.shape
    true = np.linalg.norm(dense(part) - matrix) / whole
    stated = (found.energies[rank:].sum() / found.energies.sum()).sqrt().item()
    best = np.linalg.norm(values[rank:]) / whole
    assert true <= best * (1 + 1e-3) + tolerance
    # In float32 the sum of squares of what is left is known to about 1e-7 of the whole.
    assert stated ** 2 == pytest.approx(true ** 2, rel=1e-3, abs=1e-6)
    rows = part.down.double()
    assert torch.allclose(rows @ rows.T, torch.eye(rank, dtype=torch.float64), atol=1e-3)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_the_leading_part_is_the_best_of_its_rank_and_what_is_left_is_stated_truly(size, decay, share):
    check(term(size, decay), max(1, int(share * min(size))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [(96, 20, 64), (48, 500, 80)], ids=str)
def test_factors_may_have_any_float_dtype(dtype, size):
    check(term(size, dtype=dtype), 12)


@pytest.mark.parametrize("size", [(96, 20, 64), (48, 500, 80), (80, 500, 48)], ids=str)
def test_all_ranks_give_the_term_itself(size):
    of = term(size)
    rank = min(size)
    assert np.allclose(dense(spectrum(of, rank).leading(rank)), dense(of), atol=1e-5 * np.abs(dense(of)).max())


def test_ranks_that_repeat_each_other_or_are_empty_do_no_harm():
    of = term((96, 20, 64))
    up, down = of.up.repeat(1, 3), of.down.repeat(3, 1)
    up[:, 45:] = 0
    down[40:45] = 0
    check(Term(up, down), 12)
    matrix = dense(Term(up, down))
    assert np.allclose(dense(spectrum(Term(up, down), 32).leading(32)), matrix, atol=1e-3 * np.abs(matrix).max())


@pytest.mark.parametrize("power", [-25.0, 25.0])
def test_factors_of_very_different_sizes_have_the_same_product(power):
    of = term((96, 20, 64))
    other = Term(of.up * 10 ** power, of.down * 10 ** -power, of.scale)
    check(other, 12)


@pytest.mark.parametrize("size", [(96, 20, 64), (80, 500, 48), (48, 500, 80)], ids=str)
def test_a_change_of_zeros_has_no_energy(size):
    of = term(size)
    found = spectrum(Term(of.up * 0, of.down), 12)
    assert not found.energies.any() and not found.leading(12).up.any()
    assert torch.isfinite(found.leading(12).down).all()


def test_a_product_that_float32_cannot_hold_is_refused():
    of = term((80, 500, 48))
    with pytest.raises(NonFiniteError, match="too large for float32"):
        spectrum(Term(of.up * 1e25, of.down * 1e25), 12)


def test_a_high_rank_takes_no_matrix_of_that_size(monkeypatch):
    decompose, sizes = torch.linalg.eigh, []

    def eigh(matrix):
        sizes.append(len(matrix))
        return decompose(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    spectrum(term((48, 3000, 80)), 12)
    spectrum(term((80, 16, 96)), 12)
    assert sizes == [48, 16, 16]
