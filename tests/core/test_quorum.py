"""When a round closes."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.quorum import Decision, Ema, decide, grace_s, required

EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)
times = st.floats(0, 1e6)


def test_first_value_of_an_average_is_taken_as_it_is():
    assert Ema(constant=0.125).update(8.0).value == 8.0


def test_average_follows_its_recurrence():
    ema = Ema(constant=0.25)
    for x in (4.0, 8.0, 0.0):
        ema = ema.update(x)
    assert ema.value == 0.75 * (0.75 * 4.0 + 0.25 * 8.0)


def test_update_leaves_the_old_average_alone():
    old = Ema(value=1.0)
    assert old.update(3.0) == Ema(value=2.0)
    assert old.value == 1.0


@pytest.mark.parametrize("constant", [0.0, -0.5, 1.5, math.nan])
def test_constant_outside_zero_to_one_is_refused(constant):
    with pytest.raises(ValueError, match="constant = "):
        Ema(constant=constant)


def test_average_of_nan_is_refused():
    with pytest.raises(ValueError, match="x = nan"):
        Ema().update(math.nan)


def grace(**changes):
    return grace_s(**({"tau": 2, "xi_step_s": 1.0, "xi_quorum_s": 0.25, "xi_sync_s": 0.75} | changes))


def test_grace_is_gamma_times_the_slack():
    assert grace(gamma=0.5) == 0.5 * (2 * 1.0 - (0.25 + 0.75))
    assert grace() == 0.8


def test_no_slack_means_no_grace():
    assert grace(xi_sync_s=1.75) == 0.0
    assert grace(xi_sync_s=9.0) == 0.0
    assert grace(tau=0) == 0.0


def test_grace_is_capped_in_inner_steps():
    assert grace(tau=10) == 1.0
    assert grace(tau=10, max_steps=2.0) == 2.0


@EXAMPLES
@given(st.integers(0, 20), times, times, times, st.floats(0, 0.99), st.floats(0, 4))
def test_quorum_grace_and_sync_fit_into_the_overlap(tau, step_s, quorum_s, sync_s, gamma, max_steps):
    window_s = grace_s(
        tau=tau, xi_step_s=step_s, xi_quorum_s=quorum_s, xi_sync_s=sync_s, gamma=gamma, max_steps=max_steps
    )
    assert 0 <= window_s <= max_steps * step_s
    assert window_s == 0 or quorum_s + window_s + sync_s <= tau * step_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tau", -1),
        ("xi_step_s", -1.0),
        ("xi_quorum_s", math.nan),
        ("xi_sync_s", math.inf),
        ("max_steps", -1.0),
    ]
    + [("gamma", gamma) for gamma in (-0.1, 1.0, math.nan)],
)
def test_bad_grace_argument_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        grace(**{name: value})


def test_integer_quorum_is_never_lowered_by_a_lapsed_lease():
    assert required(3, {"a", "b", "c"}, {"a", "b"}) == 3


def test_all_means_members_at_open_less_those_that_lapsed():
    assert required("all", {"a", "b", "c"}, set()) == 3
    assert required("all", {"a", "b", "c"}, {"b"}) == 2


def test_a_lapsed_stranger_does_not_lower_the_quorum():
    assert required("all", {"a", "b"}, {"z"}) == 2


def test_all_needs_at_least_one():
    assert required("all", {"a"}, {"a"}) == 1
    assert required("all", [], []) == 1


@pytest.mark.parametrize("quorum", [0, -1, True, 1.5, "al", "any"])
def test_bad_quorum_is_refused(quorum):
    with pytest.raises(ValueError, match="quorum = "):
        required(quorum, {"a"}, set())


def ask(**changes):
    defaults = {"now_s": 10.0, "arrived": 2, "invited_open": 1, "required": 2}
    return decide(**(defaults | {"quorum_reached_s": 9.0, "grace_s": 3.0} | changes))


def test_below_quorum_the_round_waits_with_its_reason():
    assert ask(arrived=1, quorum_reached_s=None) == Decision(
        False, None, "waiting for K=2 contributions, have 1"
    )


def test_below_quorum_it_waits_even_when_nobody_is_invited():
    assert not ask(arrived=1, invited_open=0, quorum_reached_s=None).close


def test_in_grace_it_waits_until_the_window_ends():
    decision = ask()
    assert (decision.close, decision.wait_until_s) == (False, 12.0)


def test_it_closes_at_once_when_nobody_else_can_come():
    assert ask(invited_open=0).close


def test_it_closes_when_the_window_ends():
    assert not ask(now_s=11.999).close
    assert ask(now_s=12.0).close


def test_without_grace_it_closes_at_quorum():
    assert ask(now_s=9.0, grace_s=0.0).close


def test_quorum_noticed_now_starts_the_window_now():
    assert ask(quorum_reached_s=None).wait_until_s == 13.0


@EXAMPLES
@given(times, times, st.floats(0, 100))
def test_asking_again_at_the_stated_moment_closes(reached_s, after_s, window_s):
    decision = ask(now_s=reached_s + after_s, quorum_reached_s=reached_s, grace_s=window_s)
    if not decision.close:
        assert ask(now_s=decision.wait_until_s, quorum_reached_s=reached_s, grace_s=window_s).close
