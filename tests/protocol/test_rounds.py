from dataclasses import replace
from typing import Any

import pytest
from protocol_helpers import policy

from farflung.core.quorum import Ema
from farflung.protocol.membership import Member
from farflung.protocol.rounds import MIN_DEADLINE_S, PATIENCE_S, Arrived, Round, Rounds, median_step_s

STEP_S = 0.5


def member(name: str = "a", step_s: float | None = STEP_S) -> Member:
    ema = Ema() if step_s is None else Ema(value=step_s)
    return Member(name, 0, state="training", lease_until_s=1e9, last_boundary_s=0.0, step_s=ema)


def arrived(learner: str, tokens: int = 10, steps: int = 1, sync_s: float = 0.1) -> Arrived:
    return Arrived(f"o.{learner}", learner, 1, 0, steps, tokens, sync_s)


def opened(**changes: Any) -> tuple[Rounds, Round]:
    rounds = Rounds(policy(**changes))
    return rounds, rounds.start(0, 0.0, frozenset("ab"))


# ---- opening ---------------------------------------------------------------------------------------------


def test_no_round_opens_while_the_step_time_is_unknown() -> None:
    assert Rounds(policy()).next_opening_s(None, 3.0) is None


def test_the_first_round_opens_at_once() -> None:
    assert Rounds(policy()).next_opening_s(STEP_S, 3.0) == 3.0


def test_the_throttle_spreads_P_rounds_over_H_steps() -> None:
    rounds, _ = opened()
    rounds.finish(0)
    assert rounds.next_opening_s(STEP_S, 0.2) == 4 * STEP_S / 2


def test_without_throttle_the_next_round_opens_at_once() -> None:
    rounds, _ = opened(throttle=False)
    rounds.finish(0)
    assert rounds.next_opening_s(STEP_S, 0.2) == 0.2


def test_at_most_tau_P_over_H_rounds_are_open() -> None:
    rounds, _ = opened(overlap_steps=2)  # ceil(2 * 2 / 4) = 1
    assert rounds.next_opening_s(STEP_S, 9.0) is None


def test_the_same_fragment_is_never_opened_twice() -> None:
    rounds = Rounds(policy(num_fragments=1, sync_every_steps=4, overlap_steps=3))
    rounds.start(0, 0.0, frozenset("a"))
    assert rounds.next_opening_s(STEP_S, 9.0) is None


def test_fragments_take_turns_and_round_numbers_grow() -> None:
    rounds = Rounds(policy())
    order = []
    for _ in range(4):
        round = rounds.start(rounds.next_fragment, 0.0, frozenset("a"))
        order.append((round.fragment, round.number))
        rounds.finish(round.fragment)
    assert order == [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert rounds.syncer_step == 8  # P rounds are H steps, twice


# ---- inviting --------------------------------------------------------------------------------------------


def test_the_deadline_of_an_invitation_is_a_step_and_tau_steps_while_nothing_was_measured() -> None:
    rounds, round = opened()
    assert rounds.invite(round, member(), 0.0, STEP_S)
    assert round.invited["a"] == STEP_S + 2 * STEP_S


@pytest.mark.parametrize(("measured", "transfer_s"), [(0.001, MIN_DEADLINE_S), (0.3, 0.6), (9.0, 2 * STEP_S)])
def test_the_deadline_is_twice_the_usual_transfer_within_bounds(measured: float, transfer_s: float) -> None:
    rounds, round = opened()
    rounds.xi_sync = Ema(value=measured)
    rounds.invite(round, member(), 0.0, STEP_S)
    assert round.invited["a"] == pytest.approx(STEP_S + transfer_s)


def test_the_deadline_of_a_slow_learner_has_room_for_its_own_step() -> None:
    rounds, round = opened()
    rounds.invite(round, member(step_s=60.0), 0.0, STEP_S)
    assert round.invited["a"] > 60.0


def test_nobody_is_asked_twice_before_the_deadline() -> None:
    rounds, round = opened()
    assert rounds.invite(round, member(), 0.0, STEP_S)
    assert not rounds.invite(round, member(), 1.0, STEP_S)


def test_below_quorum_a_lapsed_invitation_is_repeated() -> None:
    rounds, round = opened(quorum=2)
    rounds.invite(round, member(), 0.0, STEP_S)
    assert rounds.invite(round, member(), 2.0, STEP_S)


def test_after_the_quorum_a_lapsed_invitation_is_not_repeated() -> None:
    rounds, round = opened()
    rounds.invite(round, member(), 0.0, STEP_S)
    rounds.arrive(round, arrived("b"), 0.5, 1, STEP_S)
    assert not rounds.invite(round, member(), 2.0, STEP_S)


def test_who_has_contributed_is_not_asked_again() -> None:
    rounds, round = opened()
    rounds.arrive(round, arrived("a"), 0.5, 2, STEP_S)
    assert not rounds.invite(round, member(), 9.0, STEP_S)


# ---- closing ---------------------------------------------------------------------------------------------


def test_below_quorum_a_round_waits_and_says_for_what() -> None:
    rounds, round = opened(quorum=2)
    rounds.arrive(round, arrived("a"), 0.5, 2, STEP_S)
    decision = rounds.review(round, 99.0, 2, set())
    assert not decision.close
    assert decision.reason == "waiting for K=2 contributions, have 1"


def test_a_quorum_closes_at_once_when_nobody_else_can_come() -> None:
    rounds, round = opened()
    rounds.arrive(round, arrived("a"), 0.5, 1, STEP_S)
    assert rounds.review(round, 0.5, 1, set()).close


def test_a_quorum_waits_for_an_invited_learner_during_grace() -> None:
    rounds, round = opened()
    rounds.invite(round, member("b"), 0.0, STEP_S)
    rounds.arrive(round, arrived("a"), 0.25, 1, STEP_S)
    assert 0 < round.grace_s <= 4 * STEP_S / 2
    decision = rounds.review(round, 0.25, 1, {"b"})
    assert decision.wait_until_s == 0.25 + round.grace_s
    assert rounds.review(round, 0.25 + round.grace_s, 1, {"b"}).close


def test_a_learner_past_its_deadline_holds_nobody_and_is_counted() -> None:
    rounds, round = opened()
    rounds.invite(round, member("b"), 0.0, STEP_S)
    rounds.arrive(round, arrived("a"), 1.4, 1, STEP_S)
    round.grace_s = 100.0
    assert not rounds.review(round, 1.5, 1, {"b"}).close
    assert rounds.review(round, 1.6, 1, {"b"}).close
    assert round.missed == {"b"}


def test_the_grace_window_lies_inside_the_throttle() -> None:
    rounds, round = opened(num_fragments=4, sync_every_steps=4, overlap_steps=3, grace_gamma=0.99)
    rounds.arrive(round, arrived("a"), 0.0, 1, STEP_S)
    assert round.grace_s <= 4 * STEP_S / 4


def test_without_slack_there_is_no_grace() -> None:
    rounds, round = opened(overlap_steps=0)
    rounds.arrive(round, arrived("a"), 0.5, 1, STEP_S)
    assert round.grace_s == 0


# ---- parts -----------------------------------------------------------------------------------------------


def test_parts_come_in_learner_order_and_their_weights_sum_to_one() -> None:
    _, round = opened()
    round.arrived = {n: arrived(n, tokens=t) for n, t in (("c", 30), ("a", 10), ("b", 10))}
    parts = round.parts("quantity")
    assert [(p.learner, p.weight) for p in parts] == [("a", 0.2), ("b", 0.2), ("c", 0.6)]


def test_a_contribution_without_weight_is_left_out() -> None:
    _, round = opened()
    round.arrived = {"a": arrived("a", tokens=0), "b": arrived("b")}
    assert [p.learner for p in round.parts("tokens")] == ["b"]


def test_parts_are_cut_to_the_median_norm_of_those_that_count() -> None:
    _, round = opened()
    norms = {"a": 2.0, "b": 1.0, "c": 8.0, "d": 99.0}
    round.arrived = {n: replace(arrived(n, tokens=0 if n == "d" else 1), norm=x) for n, x in norms.items()}
    assert [(p.learner, p.scale) for p in round.parts("tokens", clip=True)] == [
        ("a", None),
        ("b", None),
        ("c", 0.25),
    ]
    assert [p.scale for p in round.parts("tokens")] == [None] * 3


def test_a_round_of_weightless_contributions_has_no_parts() -> None:
    _, round = opened()
    round.arrived = {"a": arrived("a", tokens=0)}
    assert round.parts("tokens") == []


# ---- step time -------------------------------------------------------------------------------------------


def test_the_step_time_is_the_median_over_those_who_progress() -> None:
    members = [member("a", 0.1), member("b", 0.2), member("c", 9.0), member("d", None)]
    assert median_step_s(members, 0.5) == 0.2
    assert (
        median_step_s(members, PATIENCE_S + 0.1) == 9.0
    )  # only c's step is long enough to be still under way
    assert median_step_s([], 0.5) is None
