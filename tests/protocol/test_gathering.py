"""The hub of a gossip run: epochs, the books, half exchanges, relays, consensus averages."""

import math
from typing import Any

import pytest
from peer_helpers import GossipDesk, offer
from protocol_helpers import notes, of, said

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import messages as msg
from farflung.protocol import snapshot
from farflung.protocol.syncer import SyncerMachine


def tokens(desk: GossipDesk) -> dict[str, Any]:
    return desk.machine.ledger.summary()["token_fragments"]


# ---- epochs ----------------------------------------------------------------------------------------------


def test_the_first_epoch_waits_for_all_expected_learners() -> None:
    desk = GossipDesk("a", "b", num_learners=3)
    assert not desk.epochs("a"), desk.story()
    desk.join("c", address="//c")
    desk.install("c")
    for name in "abc":
        (first,) = desk.epochs(name)
        assert (first.number, first.round) == (1, 0)
        assert [(p.name, p.address) for p in first.members] == [("a", "//a"), ("b", "//b"), ("c", "//c")]


def test_the_first_epoch_waits_a_lease_at_most() -> None:
    desk = GossipDesk("a", "b", num_learners=3)
    desk.wait(4.0, "a", "b")
    assert not desk.epochs("a")
    desk.wait(1.0, "a", "b")
    assert [[p.name for p in e.members] for e in desk.epochs("a")] == [["a", "b"]], desk.story()


def test_all_members_are_told_the_same_epoch() -> None:
    desk = GossipDesk("b", "a", "c")
    assert desk.epochs("a") == desk.epochs("b") == desk.epochs("c")
    assert [p.name for p in desk.epochs("a")[0].members] == ["a", "b", "c"]


def test_two_runs_draw_other_pairs() -> None:
    one, other = (SyncerMachine(GossipDesk("a").policy, run=r, num_learners=2, budget_tokens=9) for r in "xy")
    assert one.merging.seed != other.merging.seed  # type: ignore[union-attr]


def test_a_lost_learner_makes_an_epoch_of_the_others_for_a_round_that_nobody_has_begun() -> None:
    desk = GossipDesk("a", "b", "c")
    desk.ended("a", 0, "b")
    desk.ended("a", 1, "b")
    desk.say("b", msg.TrainerLost(reason="crashed"))
    newest = desk.epochs("a")[-1]
    assert (newest.number, newest.round) == (2, 3), desk.story()
    assert [p.name for p in newest.members] == ["a", "c"]


def test_a_silent_learner_is_left_out_until_it_is_heard() -> None:
    desk = GossipDesk("a", "b")
    desk.wait(6.0, "a")
    assert [p.name for p in desk.epochs("a")[-1].members] == ["a"], desk.story()
    desk.wait(0.1, "a", "b")
    assert [p.name for p in desk.epochs("b")[-1].members] == ["a", "b"]
    assert [e.number for e in desk.epochs("a")] == [1, 2, 3]


def test_a_joiner_is_a_member_once_it_has_proved_what_it_holds() -> None:
    desk = GossipDesk("a", "b")
    desk.join("c", address="//c")
    assert len(desk.epochs("a")) == 1
    desk.install("c")
    assert [p.name for p in desk.epochs("a")[-1].members] == ["a", "b", "c"], desk.story()
    assert desk.epochs("c") == desk.epochs("a")[1:]


def test_who_reattaches_is_told_the_newest_epoch_again_and_nobody_else_is() -> None:
    desk = GossipDesk("a", "b")
    desk.take(ev.Disconnected(connection=desk.lines["a"]))
    desk.join("a", incarnation=1, address="//a")
    assert [e.number for e in desk.epochs("a")] == [1], desk.story()
    assert [e.number for e in desk.epochs("b")] == [1]


def test_who_comes_back_elsewhere_is_dialled_there() -> None:
    desk = GossipDesk("a", "b")
    desk.take(ev.Disconnected(connection=desk.lines["a"]))
    desk.join("a", incarnation=1, address="//moved")
    newest = desk.epochs("b")[-1]
    assert newest.number == 2, desk.story()
    assert [p.address for p in newest.members] == ["//moved", "//b"]


def test_a_speed_that_was_seen_is_known_in_the_next_epoch() -> None:
    desk = GossipDesk("a", "b", "c")
    desk.ended("a", 0, "b", mbps=3.5)
    desk.say("c", msg.TrainerLost(reason="crashed"))
    assert [p.mbps for p in desk.epochs("b")[-1].members] == [3.5, None], desk.story()


def test_epochs_go_on_counting_after_the_hub_was_away() -> None:
    desk = GossipDesk("a", "b", "c")
    desk.say("c", msg.TrainerLost(reason="crashed"))
    desk.ended("a", 4, "b", number=2)
    saved = snapshot.decode(snapshot.encode(snapshot.snapshot(desk.machine)))
    for member in saved.members:
        member.state = "saved" if member.state == "training" else member.state
    desk.machine = SyncerMachine(desk.policy, run="by-hand", num_learners=3, budget_tokens=10**9)
    snapshot.restore(desk.machine, saved, desk.now)
    for name in "ab":
        desk.join(name, incarnation=1, address=f"//{name}")
    desk.wait(5.0, "a", "b")
    desk.wait(0.5, "a", "b")
    newest = desk.epochs("a")[-1]
    assert newest.number > 2 and newest.round == 6, desk.story()


# ---- books -----------------------------------------------------------------------------------------------


def test_all_that_was_trained_is_merged_when_its_round_is_mixed() -> None:
    """`Desk.take` checks at every event that trained = merged + discarded + in flight."""
    desk = GossipDesk("a", "b")
    desk.boundary("a")
    desk.boundary("a")
    assert (tokens(desk)["merged"], tokens(desk)["in_flight"]) == (0, 20)
    desk.ended("a", 0, "b")
    desk.boundary("b")
    assert (tokens(desk)["merged"], tokens(desk)["in_flight"]) == (30, 10), desk.story()


def test_a_round_without_a_meeting_is_merged_too() -> None:
    """The learner takes its outer step; its work is in parameters that others will meet."""
    desk = GossipDesk("a", "b")
    desk.ended("a", 0, missed="b")
    assert tokens(desk)["merged"] == 10


def test_what_a_lost_learner_had_not_mixed_is_discarded() -> None:
    desk = GossipDesk("a", "b")
    desk.ended("a", 0, "b")
    desk.boundary("a")
    desk.say("a", msg.TrainerLost(reason="crashed"))
    assert tokens(desk)["discarded"] == {"learner_lost": 10}, desk.story()
    assert tokens(desk)["merged"] == 10


def test_a_repeated_report_changes_nothing() -> None:
    desk = GossipDesk("a", "b")
    desk.ended("a", 0, "b")
    before = desk.books()
    desk.sequences["a"] -= 1
    desk.ended("a", 0, "b")
    assert desk.books() == before, desk.story()


def test_a_round_that_met_somebody_completes_a_rejoin() -> None:
    desk = GossipDesk("a", "b")
    desk.boundary("a")
    desk.say("a", msg.TrainerLost(reason="crashed"))
    desk.join("a")
    desk.install("a")
    desk.ended("a", 2, missed="b")
    assert desk.machine.admission.rejoins == 0
    desk.ended("a", 3, "b")
    assert desk.machine.admission.rejoins == 1, desk.story()


def test_a_donor_has_met_somebody() -> None:
    desk = GossipDesk("a", "b", "c")
    desk.ended("a", 0, missed="b")
    desk.ended("b", 0, missed="a")
    desk.boundary("c")
    desk.join("d")
    assert not desk.heard("a", msg.Donate) and not desk.heard("b", msg.Donate)
    desk.ended("b", 1, "c")
    desk.join("e")
    assert desk.heard("b", msg.Donate), desk.story()


# ---- half exchanges --------------------------------------------------------------------------------------


def halves(desk: GossipDesk) -> list[dict[str, Any]]:
    return desk.tape.notes("half_exchange")


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_meeting_that_one_side_mixed_is_counted_once_with_the_drift_of_the_mean(first: str) -> None:
    desk = GossipDesk("a", "b", "c", "d")
    sides = {"a": {"met": "b", "correction": 2.0}, "b": {"missed": "a"}}
    second = "b" if first == "a" else "a"
    for name in (first, second):
        desk.ended(name, 0, **sides[name])
    (half,) = halves(desk)
    assert half == {"epoch": 1, "round": 0, "learners": ["a", "b"], "drift": 0.5}, desk.story()
    assert desk.gathering.half_exchanges == 1


def test_a_meeting_that_both_sides_or_none_mixed_is_no_half_exchange() -> None:
    desk = GossipDesk("a", "b")
    desk.ended("a", 0, "b")
    desk.ended("b", 0, "a")
    desk.ended("a", 1, missed="b")
    desk.ended("b", 1, missed="a")
    assert not halves(desk), desk.story()


def test_meetings_are_counted_once_and_missed_ones_by_reason() -> None:
    desk = GossipDesk("a", "b")
    desk.ended("a", 0, "b")
    desk.ended("b", 0, "a")
    desk.ended("a", 1, missed="b")
    meetings = [msg.Meeting(partner="a", missed="not_finite")]
    desk.ended("b", 2, meetings=meetings)
    assert desk.gathering.meetings == 1, desk.story()
    assert desk.gathering.missed == {"deadline": 1, "not_finite": 1}


def test_a_side_that_never_reports_is_forgotten_in_time() -> None:
    desk = GossipDesk("a", "b")
    for round in range(5000):
        desk.machine.merging.mixed(  # type: ignore[union-attr]
            desk.member("a"),
            msg.RoundMixed(epoch=1, round=round, meetings=[msg.Meeting(partner="b")], correction=0.0),
        )
    assert len(desk.gathering._sides) == 4096


def test_meetings_of_other_rounds_and_epochs_are_not_compared() -> None:
    desk = GossipDesk("a", "b")
    desk.ended("a", 0, "b")
    desk.ended("b", 1, missed="a")
    desk.ended("b", 0, missed="a", number=0)
    assert not halves(desk), desk.story()


def test_one_side_that_tells_twice_is_not_both_sides() -> None:
    desk = GossipDesk("a", "b")
    desk.ended("a", 0, "b")
    desk.ended("a", 0, missed="b")
    assert not halves(desk), desk.story()


# ---- numbers that cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"round": -1},
        {"mbps": 0.0},
        {"mbps": -1.0},
        {"mbps": math.nan},
        {"mbps": math.inf},
        {"bytes_up": -1},
        {"meetings": [msg.Meeting(partner="b"), msg.Meeting(partner="b", missed="late")]},
        {"meetings": [msg.Meeting(partner="a")]},
    ],
    ids=str,
)
def test_a_report_with_impossible_numbers_costs_the_connection_and_changes_nothing(changes: Any) -> None:
    desk = GossipDesk("a", "b")
    before = desk.books()
    actions = desk.ended("a", **{"round": 0, **changes})
    assert of(actions, act.HangUp), desk.story()
    assert desk.machine.refused == {"malformed": 1}
    assert desk.books() == before


@pytest.mark.parametrize("changes", [{"round": 10**6}, {"round": 2**62}, {"round": 0, "number": 2}], ids=str)
def test_a_round_that_nobody_can_be_in_is_refused_by_name(changes: Any) -> None:
    """Else it would be everybody's at the next epoch, until numbers do not fit into a message."""
    desk = GossipDesk("a", "b")
    desk.ended("a", met="b", **changes)
    assert desk.machine.refused == {"round": 1}, desk.story()
    assert (desk.gathering.round, tokens(desk)["merged"]) == (-1, 0)


@pytest.mark.parametrize("mbps", [math.nan, -1.0, 0.0, math.inf])
def test_a_speed_that_cannot_be_is_refused_at_the_door(mbps: float) -> None:
    desk = GossipDesk("a", "b")
    actions = desk.join("c", mbps=mbps)
    assert said(actions, msg.Refused), desk.story()
    assert "c" not in desk.machine.membership.members


# ---- relays ----------------------------------------------------------------------------------------------


def relay(desk: GossipDesk, sender: str, name: str, partner: str = "b") -> list[act.SyncerAction]:
    return desk.say(sender, msg.Relay(partner=partner, object=name, num_bytes=8))


def relayed(desk: GossipDesk, receiver: str, name: str, partner: str = "a") -> list[act.SyncerAction]:
    return desk.say(receiver, msg.Relayed(partner=partner, object=name))


def test_a_vector_at_the_hub_is_told_to_its_receiver_and_its_fetching_to_its_sender() -> None:
    desk = GossipDesk("a", "b")
    relay(desk, "a", offer("a", "b"))
    assert desk.heard("b", msg.Relay) == [msg.Relay(partner="a", object=offer("a", "b"), num_bytes=8)]
    actions = relayed(desk, "b", offer("a", "b"))
    assert desk.heard("a", msg.Relayed) == [msg.Relayed(partner="b", object=offer("a", "b"))], desk.story()
    assert [d.object for d in of(actions, act.Discard)] == [offer("a", "b")]


def test_a_refusal_goes_back_to_the_sender() -> None:
    desk = GossipDesk("a", "b")
    relay(desk, "a", offer("a", "b"))
    desk.say("b", msg.Relayed(partner="a", object=offer("a", "b"), refusal="late"))
    assert [m.refusal for m in desk.heard("a", msg.Relayed)] == ["late"]


@pytest.mark.parametrize("away", [False, True])
def test_a_vector_for_somebody_who_is_not_here_is_let_go_of(away: bool) -> None:
    desk = GossipDesk("a", "b")
    if away:
        desk.take(ev.Disconnected(connection=desk.lines["b"]))
    partner = "b" if away else "z"
    actions = relay(desk, "a", offer("a", partner), partner)
    assert [d.object for d in of(actions, act.Discard)] == [offer("a", partner)], desk.story()
    assert [m.refusal for m in desk.heard("a", msg.Relayed)] == ["unreachable"]


@pytest.mark.parametrize(
    ("name", "partner"),
    [
        (offer("c", "b"), "b"),
        (offer("a", "c"), "b"),
        (offer("b", "a"), "b"),
        ("offer.1.00.a.b", "b"),
        ("contribution.a.1.0.1", "b"),
        ("state.x", "b"),
    ],
)
def test_a_relay_of_somebody_elses_object_is_refused_by_name(name: str, partner: str) -> None:
    desk = GossipDesk("a", "b", "c")
    for actions in (relay(desk, "a", name, partner), relayed(desk, "b", name)):
        assert not of(actions, act.Send) and not of(actions, act.Discard), desk.story()
        assert [n["learner"] for n in notes(actions, "refused")] != []
    assert desk.machine.refused == {"malformed": 2}


def test_a_relay_in_a_run_with_a_hub_is_refused() -> None:
    from protocol_helpers import Desk

    desk = Desk("a", "b")
    desk.say("a", msg.Relay(partner="b", object=offer("a", "b"), num_bytes=8))
    assert desk.machine.refused == {"malformed": 1}


# ---- consensus averages ----------------------------------------------------------------------------------


def asking(**changes: Any) -> GossipDesk:
    """One average after half of the budget, which is ten steps."""
    return GossipDesk("a", "b", gathers=1, budget_tokens=100, **changes)


def test_everybody_is_asked_when_a_part_of_the_budget_is_spent() -> None:
    desk = asking()
    for _ in range(4):
        desk.boundary("a")
    assert not desk.heard("b", msg.Invite)
    desk.boundary("a")
    assert [i.round for i in desk.heard("b", msg.Invite)] == [1], desk.story()
    assert [i.round for i in desk.heard("a", msg.Invite)] == [1]


def averaged(desk: GossipDesk, *names: str) -> list[act.SyncerAction]:
    """An average is due, and these show their parameters."""
    for _ in range(5):
        desk.boundary("a")
    return [a for name in names for a in desk.send(name, 1)]


def test_an_average_is_taken_when_everybody_has_shown_its_parameters() -> None:
    desk = asking()
    (merge,) = of(averaged(desk, "a", "b"), act.Merge)
    assert [(p.learner, p.weight) for p in merge.parts] == [("a", 0.5), ("b", 0.5)]
    actions = desk.merged(merge)
    assert [(n["version"], n["distance"]) for n in notes(actions, "consensus")] == [(1, 1.0)], desk.story()
    assert tokens(desk)["merged"] == 0  # it is a measurement: nobody trains from it


def test_an_average_waits_a_lease_for_those_who_are_late() -> None:
    desk = asking()
    assert not of(averaged(desk, "a"), act.Merge)
    desk.wait(4.9, "a", "b")
    assert not of(desk.take(ev.TimerFired(name="round.0")), act.Merge)
    desk.now += 0.2
    (merge,) = of(desk.take(ev.TimerFired(name="round.0")), act.Merge)
    assert [p.learner for p in merge.parts] == ["a"], desk.story()


def test_an_average_does_not_wait_for_the_dead() -> None:
    desk = asking()
    averaged(desk, "a")
    actions = desk.say("b", msg.TrainerLost(reason="crashed"))
    assert [[p.learner for p in m.parts] for m in of(actions, act.Merge)] == [["a"]], desk.story()


def test_an_average_to_which_nobody_came_is_given_up() -> None:
    desk = asking()
    averaged(desk)
    desk.now += 5.1
    desk.take(ev.TimerFired(name="round.0"))
    assert desk.open_round(0) is None, desk.story()
    assert [note["round"] for note in desk.tape.notes("round_given_up")] == [1]


def test_the_end_averages_what_was_handed_in_and_leaves_nothing_in_flight() -> None:
    desk = GossipDesk("a", "b", budget_tokens=30)
    for _ in range(2):
        desk.boundary("a")
    desk.boundary("b")
    (finish,) = desk.heard("a", msg.Finish)
    for name in "ab":
        desk.send(name, finish.rounds[0])
        actions = desk.say(name, msg.HandedIn())
    (merge,) = of(actions, act.Merge)
    desk.merged(merge)
    assert desk.machine.phase == "finished", desk.story()
    assert tokens(desk) == {"trained": 30, "merged": 30, "discarded": {}, "in_flight": 0}
