"""The DCT of small matrices: its formula, its inverse, and what could make its products inexact."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.codecs.dct import basis, dct, dct_plain, idct, idct_plain

pytestmark = pytest.mark.usefixtures("one_thread")

SIDES = st.sampled_from([1, 2, 3, 5, 7, 8, 29, 31, 61, 63, 64])


def _matrices(n, h, w, seed=0):
    return torch.randn(n, h, w, generator=torch.Generator().manual_seed(seed))


def _formula(x):
    """DCT-II of a list, one coefficient at a time."""
    n = len(x)
    scales = [math.sqrt((1 if k == 0 else 2) / n) for k in range(n)]
    return [
        scales[k] * math.fsum(x[i] * math.cos(math.pi * (i + 0.5) * k / n) for i in range(n))
        for k in range(n)
    ]


@pytest.mark.parametrize(("h", "w"), [(1, 1), (1, 7), (5, 3), (8, 8)])
def test_it_is_the_formula_along_rows_and_then_along_columns(h, w):
    x = _matrices(1, h, w)
    rows = [_formula(row) for row in x[0].tolist()]
    columns = [_formula(column) for column in zip(*rows, strict=True)]
    torch.testing.assert_close(dct(x)[0], torch.tensor(columns).T, rtol=0, atol=1e-6)


@given(n=st.integers(0, 3), h=SIDES, w=SIDES, seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_the_inverse_gives_the_matrix_back_whatever_its_sides(n, h, w, seed):
    x = _matrices(n, h, w, seed)
    torch.testing.assert_close(idct(dct(x)), x, rtol=0, atol=4e-6)
    torch.testing.assert_close(dct(idct(x)), x, rtol=0, atol=4e-6)


@given(n=st.integers(1, 3), h=SIDES, w=SIDES, seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_fast_and_plain_agree_and_energy_is_kept(n, h, w, seed):
    x = _matrices(n, h, w, seed)
    out, scratch = torch.full((2, n, h, w), math.nan)
    assert dct(x, out, scratch) is out
    torch.testing.assert_close(out, dct_plain(x.double()).float(), rtol=0, atol=4e-6)
    torch.testing.assert_close(idct(x), idct_plain(x.double()).float(), rtol=0, atol=4e-6)
    assert out.norm().item() == pytest.approx(x.norm().item(), rel=1e-5)


@pytest.mark.parametrize("side", [1, 2, 29, 64])
def test_the_basis_is_orthonormal(side):
    rows = basis(side, torch.float32, torch.device("cpu")).double()
    torch.testing.assert_close(rows @ rows.T, torch.eye(side).double(), rtol=0, atol=1e-6)


def test_products_that_the_user_lets_pytorch_round_are_exact_here():
    x = _matrices(4, 64, 64)
    want = dct(x)
    try:
        for precision in ("high", "medium"):
            torch.set_float32_matmul_precision(precision)
            torch.testing.assert_close(dct(x), want, rtol=0, atol=4e-6)
            torch.testing.assert_close(idct(want), x, rtol=0, atol=4e-6)
    finally:
        torch.set_float32_matmul_precision("highest")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert dct(x).dtype == torch.float32
        torch.testing.assert_close(dct(x), want, rtol=0, atol=4e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_matrix_that_is_not_finite_has_no_finite_coefficient_and_harms_no_other(bad):
    x = _matrices(3, 8, 64)
    x[1, 2, 3] = bad
    for way in (dct, idct):
        finite = torch.isfinite(way(x))
        assert finite[0].all() and finite[2].all() and not finite[1].any()
