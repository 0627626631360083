"""No learner's size decides a merge: what is above the median norm is cut to it, all else is left alone."""

from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.core.clip import to_median

norms = st.lists(st.floats(0, 1e30, allow_subnormal=False), min_size=1, max_size=9)


@given(norms)
def test_what_is_above_the_median_is_cut_to_it_and_nothing_else(found: list[float]) -> None:
    middle = median(found)
    for norm, scale in zip(found, to_median(found), strict=True):
        if norm <= middle or not middle:
            assert scale == 1.0
        else:
            assert 0 < scale <= 1 and norm * scale == pytest.approx(middle)


@given(norms)
def test_it_is_the_naive_rule_in_float64(found: list[float]) -> None:
    values = np.array(found)
    with np.errstate(all="ignore"):
        naive = np.minimum(1.0, np.median(values) / values)
    naive = np.where((values == 0) | (np.median(values) == 0), 1.0, naive)
    assert np.allclose(to_median(found), naive, rtol=1e-12)


@given(norms, st.randoms())
def test_the_order_of_learners_does_not_matter(found: list[float], random: object) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert sorted(to_median(found)) == sorted(to_median(shuffled))


def test_one_learner_alone_and_equal_ones_are_left_as_they_are() -> None:
    assert to_median([7.0]) == [1.0] and to_median([3.0] * 4) == [1.0] * 4


def test_an_outlier_however_large_counts_as_much_as_the_median() -> None:
    assert [n * s for n, s in zip([1, 2, 1e12], to_median([1, 2, 1e12]), strict=True)] == [1, 2, 2]
