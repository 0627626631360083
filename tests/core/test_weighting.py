"""Weight rules and their normalisation."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.weighting import WEIGHTINGS, normalise

EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)
weights = st.lists(st.floats(0, 1e308), min_size=1, max_size=8).filter(any)


def test_tokens_is_quantity_times_tokens_per_step():
    assert WEIGHTINGS["tokens"](3000, 6) == 3000 * (3000 / 6)


def test_tokens_gives_nothing_without_steps():
    assert WEIGHTINGS["tokens"](0, 0) == 0.0
    assert WEIGHTINGS["tokens"](5, 0) == 0.0


def test_quantity_ignores_steps():
    assert WEIGHTINGS["quantity"](3000, 6) == WEIGHTINGS["quantity"](3000, 60) == 3000.0


def test_equal_ignores_everything():
    assert {WEIGHTINGS["equal"](tokens, steps) for tokens in (0, 7) for steps in (1, 9)} == {1.0}


def test_at_equal_batch_size_tokens_is_proportional_to_quantity():
    shares = [normalise([WEIGHTINGS[rule](steps * 512, steps) for steps in (1, 2, 5)]) for rule in WEIGHTINGS]
    assert shares[0] == shares[1] == [0.125, 0.25, 0.625]


def test_identical_weights_give_exactly_one_nth():
    for n in range(1, 20):
        assert normalise([0.3] * n) == [1 / n] * n


@EXAMPLES
@given(weights)
def test_normalised_weights_sum_to_one(values):
    assert math.fsum(normalise(values)) == pytest.approx(1.0, abs=1e-15 * len(values))


@EXAMPLES
@given(weights)
def test_order_does_not_change_a_weight(values):
    assert normalise(values[::-1]) == normalise(values)[::-1]


@EXAMPLES
@given(st.lists(st.floats(1e-100, 1e100), min_size=1, max_size=8), st.integers(-100, 100))
def test_a_power_of_two_as_common_factor_changes_nothing(values, exponent):
    assert normalise([math.ldexp(value, exponent) for value in values]) == normalise(values)


def test_huge_and_tiny_weights_neither_overflow_nor_vanish():
    assert normalise([1.7e308, 1.7e308]) == [0.5, 0.5]
    assert normalise([5e-324, 5e-324]) == [0.5, 0.5]


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_negative_and_non_finite_weights_are_refused_by_position(bad):
    with pytest.raises(ValueError, match=r"weights\[1\] = "):
        normalise([1.0, bad])


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0]])
def test_no_positive_weight_is_refused(values):
    with pytest.raises(ValueError, match="at least one must be positive"):
        normalise(values)
