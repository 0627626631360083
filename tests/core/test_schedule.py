"""When fragments are due, and the learning rate."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.schedule import (
    check,
    due_fragment,
    max_in_flight,
    offsets,
    round_interval_s,
    warmup_cosine,
)

EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)
h_and_p = st.integers(1, 60).flatmap(lambda H: st.tuples(st.just(H), st.integers(1, H)))


def test_as_many_fragments_as_steps_gives_one_a_step():
    assert offsets(24, 24) == list(range(24))


def test_one_fragment_is_due_at_the_start_of_each_period():
    assert [step for step in range(1, 1501) if due_fragment(step, 500, 1)] == [500, 1000, 1500]


@EXAMPLES
@given(h_and_p)
def test_each_fragment_is_due_once_a_period_and_never_two_at_once(pair):
    H, P = pair
    due = [due_fragment(step, H, P) for step in range(3 * H, 4 * H)]
    assert all(len(fragments) <= 1 for fragments in due)
    assert [p for fragments in due for p in fragments] == list(range(P))


@EXAMPLES
@given(h_and_p)
def test_offsets_are_evenly_spread(pair):
    H, P = pair
    ends = [*offsets(H, P), H]
    gaps = {b - a for a, b in pairwise(ends)}
    assert gaps <= {H // P, -(-H // P)}


@EXAMPLES
@given(h_and_p, st.data())
def test_rounds_in_flight_are_what_overlapping_windows_give(pair, data):
    H, P = pair
    tau = data.draw(st.integers(0, H - 1))
    starts = [step for step in range(3 * H) if due_fragment(step, H, P)]
    open_at = [sum(s <= step < s + max(tau, 1) for s in starts) for step in range(H, 2 * H)]
    assert max(open_at) <= max_in_flight(H, P, tau)


def test_main_run_of_the_paper_has_two_in_flight():
    assert max_in_flight(24, 24, 2) == 2
    assert max_in_flight(500, 1, 0) == 1


@pytest.mark.parametrize(
    ("H", "P", "tau", "message"),
    [
        (0, 1, 0, r"H = 0: must be at least 1 \(H: sync_every_steps\)"),
        (4, 0, 0, r"P = 0: must be at least 1 \(P: num_fragments\)"),
        (4, 1, -1, r"tau = -1: must be at least 0 \(tau: overlap_steps\)"),
        (4, 5, 0, "P = 5: must be at most H = 4"),
        (4, 2, 4, "tau = 4: must be less than H = 4"),
    ],
)
def test_inconsistent_schedule_is_refused(H, P, tau, message):
    with pytest.raises(ValueError, match=message):
        check(H, P, tau)


def test_no_overlap_is_a_schedule():
    check(1, 1, 0)


def test_negative_step_is_refused():
    with pytest.raises(ValueError, match="step = -1"):
        due_fragment(-1, 4, 2)


def test_rounds_open_at_the_pace_of_the_steps():
    assert round_interval_s(24, 24, 0.5) == 0.5
    assert round_interval_s(100, 4, 0.1) == 2.5


@pytest.mark.parametrize("xi_step_s", [-1.0, math.nan, math.inf])
def test_bad_step_time_is_refused(xi_step_s):
    with pytest.raises(ValueError, match="xi_step_s = "):
        round_interval_s(24, 24, xi_step_s)


def test_warmup_is_linear_and_its_first_step_moves():
    assert [warmup_cosine(step, 0.0, warmup_steps=4) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_has_its_closed_form():
    assert warmup_cosine(100, 0.5, floor=0.0) == pytest.approx(0.5)
    assert warmup_cosine(100, 1 / 3, floor=0.2) == pytest.approx(0.2 + 0.8 * 0.75)


def test_it_ends_at_the_floor_and_stays_there():
    assert warmup_cosine(100, 1.0, floor=0.1) == warmup_cosine(100, 1.7, floor=0.1) == 0.1


def test_no_warmup_starts_at_one():
    assert warmup_cosine(0, 0.0, warmup_steps=0) == 1.0


@EXAMPLES
@given(st.integers(0, 200), st.floats(0, 1.2), st.floats(0, 1.2), st.floats(0, 1))
def test_it_rises_with_own_steps_and_falls_with_progress(own_steps, a, b, floor):
    early, late = sorted((a, b))
    now = warmup_cosine(own_steps, early, floor=floor)
    assert 0 <= now <= 1
    assert (
        warmup_cosine(own_steps, late, floor=floor) <= now <= warmup_cosine(own_steps + 1, early, floor=floor)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0.0), "own_steps = -1"),
        ((0, -0.1), "progress = -0.1"),
        ((0, math.nan), "progress = nan"),
        ((0, 0.0, -1), "warmup_steps = -1"),
        ((0, 0.0, 60, 1.5), "floor = 1.5"),
    ],
)
def test_bad_learning_rate_argument_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        warmup_cosine(*arguments)
