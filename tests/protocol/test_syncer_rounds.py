from typing import Any

import pytest
from protocol_helpers import Desk, notes, of, said

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import messages as msg


def with_open_round(*names: str, **changes: Any) -> Desk:
    """Round 1 of fragment 0 is open and everybody was invited."""
    desk = Desk(*(names or ("a", "b", "c")), **changes)
    for name in desk.lines:
        desk.boundary(name)
    assert desk.open_round(0) == 1, desk.story()
    return desk


def fate_of(actions: list[Any]) -> tuple[str, str]:
    (fate,) = said(actions, msg.FateOf)
    return fate.fate, fate.reason


# ---- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "fate", "reason"),
    [
        ({"finite": False}, "rejected", "non_finite"),
        ({"problem": "missing: no such object"}, "rejected", "missing: no such object"),
        ({"base": 7}, "rejected", "base version 7 was never announced to you (newest: 0)"),
        ({"base": -1}, "rejected", "base version -1 was never announced to you (newest: 0)"),
        ({"round": 99}, "late", "the round had closed"),
    ],
)
def test_a_bad_contribution_is_refused_by_name_and_changes_nothing(
    wrong: dict[str, Any], fate: str, reason: str
) -> None:
    desk = with_open_round()
    before = desk.books()
    actions = desk.send("a", **{"round": 1, **wrong})
    assert fate_of(actions) == (fate, reason), desk.story()
    assert [d.object for d in of(actions, act.Discard)] == [f"contribution.a.1.0.{wrong.get('round', 1)}"]
    assert desk.books() == before


def test_a_refused_contributions_tokens_are_counted_once_they_are_overwritten() -> None:
    desk = with_open_round("a", "b")
    assert fate_of(desk.contribute("a", 1, finite=False)) == ("rejected", "non_finite")
    desk.merged(desk.round("b"))
    desk.boundary("a", tokens=5, adopted=[(0, 1)])
    assert desk.machine.ledger.discarded["rejected"] == 20, desk.story()
    assert desk.machine.ledger.discarded["superseded"] == 5


def test_three_contributions_in_a_row_that_are_not_finite_cost_the_incarnation() -> None:
    desk = with_open_round()
    for round in (1, 2):
        assert not said(desk.send("a", round, finite=False), msg.Stop), desk.story()
    actions = desk.send("a", 3, finite=False)
    assert said(actions, msg.Stop) == [msg.Stop(reason="reset")], desk.story()
    assert desk.member("a").state == "gone"
    assert said(desk.join("a"), msg.Welcome)[0].incarnation == 2


def test_a_good_contribution_ends_a_row_of_bad_ones() -> None:
    desk = with_open_round(quorum=3)
    for round in (7, 8):
        desk.send("a", round, finite=False)
    desk.contribute("a", 1)
    desk.send("a", 9, finite=False)
    assert desk.member("a").state == "training", desk.story()


def test_good_contributions_to_other_fragments_do_not_hide_a_broken_one() -> None:
    desk = with_open_round(quorum=3)
    for round in (7, 8):
        desk.send("a", round, fragment=1, finite=False)
    desk.contribute("a", 1)
    desk.send("a", 9, fragment=1, finite=False)
    assert desk.member("a").state == "gone", desk.story()


def test_in_lockstep_a_single_one_is_enough_for_nobody_can_wait() -> None:
    desk = Desk("a", "b", pace="lockstep", quorum="all")
    actions = desk.contribute("a", 1, finite=False)
    assert said(actions, msg.Stop) == [msg.Stop(reason="reset")], desk.story()


def test_a_version_that_is_gone_is_a_stale_base() -> None:
    desk = with_open_round("a", "b", overlap_steps=1)  # three versions are kept
    for version in range(1, 5):
        desk.now += 5.0
        desk.boundary("a", adopted=[(0, version - 1)] if version > 1 else [])
        if desk.open_round(1) is not None:
            actions = desk.contribute(
                "a", desk.open_round(1), fragment=1, base=desk.machine.merging.versions[1]
            )  # type: ignore[arg-type]
            desk.now += 60.0
            actions += desk.take(ev.TimerFired(name="round.1", late_s=60.0))
            merge = of(actions, act.Merge)[0]
            desk.merged(merge)
            desk.boundary("a", adopted=[(1, merge.version)])
            desk.now += 5.0
            desk.boundary("a")
        desk.merged(desk.round("a"))
    assert 0 not in desk.machine.merging.kept[0], desk.story()
    before = desk.books()
    fate, reason = fate_of(desk.send("b", 99, base=0))
    assert fate == "stale_base"
    assert "base version 0 is gone" in reason
    assert desk.books() == before


def test_a_contribution_from_somebody_who_does_not_train_is_refused() -> None:
    desk = with_open_round()
    desk.join("d")
    before = desk.books()
    assert fate_of(desk.send("d", 1))[0] == "rejected", desk.story()
    assert desk.books() == before


# ---- repeats ---------------------------------------------------------------------------------------------


def test_a_repeat_before_the_merge_changes_nothing() -> None:
    desk = with_open_round(quorum=2)
    desk.contribute("a", 1)
    before = desk.books()
    actions = desk.send("a", 1)
    assert not of(actions, act.Discard), desk.story()  # it lies in the round
    assert desk.machine.refused == {"repeat": 1}
    assert desk.books() == before


def test_a_repeat_after_the_merge_returns_the_recorded_fate_and_changes_nothing() -> None:
    desk = with_open_round()
    desk.merged(desk.round("a"))
    before = desk.books()
    actions = desk.send("a", 1, problem="missing: no such object")
    assert fate_of(actions) == ("merged", "repeat"), desk.story()
    assert desk.books() == before


def test_a_repeat_of_a_refused_contribution_stays_refused() -> None:
    desk = with_open_round()
    desk.send("a", 1, finite=False)
    before = desk.books()
    assert fate_of(desk.send("a", 1)) == ("rejected", "repeat"), desk.story()
    assert desk.books() == before


def test_a_new_snapshot_for_a_round_that_refused_the_first_one_is_no_repeat() -> None:
    """Below quorum the round asks again; were this a repeat, the round could never close."""
    desk = with_open_round("a", "b", quorum=2)
    desk.contribute("a", 1)
    assert fate_of(desk.contribute("b", 1, finite=False))[0] == "rejected"
    (merge,) = of(desk.contribute("b", 1), act.Merge)
    assert [p.learner for p in merge.parts] == ["a", "b"], desk.story()
    desk.merged(merge)
    assert desk.machine.ledger.merged == 50


def test_below_quorum_a_learner_that_waits_is_asked_again() -> None:
    """It reports no steps, so the deadline of its invitation must bring the next one."""
    desk = with_open_round("a", "b", quorum=2, max_lead_steps=4)
    desk.contribute("a", 1)
    before = len(desk.heard("b", msg.Invite))
    desk.now = desk.machine.merging.rounds.open[0].invited["b"] + 0.01
    desk.take(ev.TimerFired(name="round.0"))
    assert len(desk.heard("b", msg.Invite)) == before + 1, desk.story()


def test_late_contribution_is_counted_and_changes_nothing() -> None:
    desk = with_open_round()
    desk.boundary("b", snapshots=[(0, 1)])
    desk.merged(desk.round("a"))
    before = desk.books()
    actions = desk.send("b", 1)
    assert fate_of(actions) == ("late", "the round had closed"), desk.story()
    assert notes(actions, "late")
    assert desk.books() == before


def test_a_contribution_that_comes_while_the_round_merges_is_late() -> None:
    desk = with_open_round()
    merge = desk.round("a")
    assert fate_of(desk.contribute("b", 1))[0] == "late", desk.story()
    assert [p.learner for p in merge.parts] == ["a"]


# ---- quorum ----------------------------------------------------------------------------------------------


def test_a_whole_number_quorum_is_never_lowered_by_a_lapsed_lease() -> None:
    desk = with_open_round("a", "b", quorum=2)
    desk.contribute("a", 1)
    for _ in range(20):
        desk.wait(4.0, "a")
    assert desk.tape.notes("lease_lapsed") == [{"learner": "b"}], desk.story()
    assert not of(desk.actions, act.Merge)
    assert any("waiting for K=2" in n["reason"] for n in desk.tape.notes("waiting"))


def test_all_is_lowered_by_a_lapsed_lease() -> None:
    desk = with_open_round("a", "b", quorum="all")
    desk.contribute("a", 1)
    assert not of(desk.actions, act.Merge)
    for _ in range(2):
        desk.wait(4.0, "a")
    (merge,) = of(desk.actions, act.Merge)
    assert [p.learner for p in merge.parts] == ["a"], desk.story()


def test_all_is_lowered_by_a_death() -> None:
    desk = with_open_round("a", "b", quorum="all")
    desk.contribute("a", 1)
    assert of(desk.say("b", msg.TrainerLost(reason="killed")), act.Merge), desk.story()


def test_a_learner_that_comes_after_the_opening_is_not_part_of_all() -> None:
    desk = with_open_round("a", "b", quorum="all")
    desk.join("d")
    desk.install("d")
    desk.contribute("a", 1)
    assert of(desk.contribute("b", 1), act.Merge) or desk.machine.merging.rounds.open[0].quorum_s is not None


def test_a_contribution_to_a_quorum_outlives_its_learner() -> None:
    desk = with_open_round("a", "b", "c", quorum=2)
    desk.contribute("a", 1)
    desk.say("a", msg.TrainerLost(reason="killed"))
    desk.now += 60.0
    actions = desk.contribute("b", 1)
    desk.now += 60.0
    actions += desk.take(ev.TimerFired(name="round.0", late_s=60.0))
    (merge,) = of(actions, act.Merge)
    assert [p.learner for p in merge.parts] == ["a", "b"], desk.story()
    desk.merged(merge)
    assert desk.machine.ledger.merged == 40  # two steps each


def test_a_learner_that_dies_in_mid_transfer_holds_nobody() -> None:
    desk = with_open_round("a", "b")
    desk.boundary("b", snapshots=[(0, 1)])
    desk.contribute("a", 1)
    actions = desk.say("b", msg.TrainerLost(reason="killed in mid-transfer"))
    (merge,) = of(actions, act.Merge)
    assert [p.learner for p in merge.parts] == ["a"], desk.story()
    assert desk.machine.ledger.discarded["learner_lost"] > 0


def test_a_silent_learner_in_mid_transfer_holds_the_round_until_its_deadline_at_most() -> None:
    desk = with_open_round("a", "b")
    desk.boundary("b", snapshots=[(0, 1)])
    desk.contribute("a", 1)
    deadline = desk.machine.merging.rounds.open[0].invited["b"]
    desk.now = deadline + 0.01
    assert of(desk.take(ev.TimerFired(name="round.0")), act.Merge), desk.story()
    assert deadline < 5.0


# ---- merging ---------------------------------------------------------------------------------------------


def test_parts_of_a_merge_come_in_learner_order_whatever_the_order_of_arrival() -> None:
    desk = with_open_round(quorum=3)
    merge = desk.round("c", "a", "b")
    assert [p.learner for p in merge.parts] == ["a", "b", "c"], desk.story()
    assert sum(p.weight for p in merge.parts) == pytest.approx(1.0)


def test_a_merge_that_is_not_finite_keeps_the_value_and_refuses_every_part() -> None:
    desk = with_open_round(quorum=2)
    merge = desk.round("a", "b")
    ledger = desk.machine.ledger.merged
    actions = desk.merged(merge, finite=False)
    fates = {(f.fate, f.reason) for f in said(actions, msg.FateOf)}
    assert fates == {("rejected", "merge_not_finite")}, desk.story()
    assert desk.machine.ledger.merged == ledger == 0
    assert desk.member("a").merged == 0
    assert desk.member("a").included == [None, None]
    assert [a["what"] for a in notes(actions, "alarm")] == ["merge_not_finite"]


def test_an_announcement_names_the_learners_last_contribution_inside() -> None:
    desk = with_open_round("a", "b")
    actions = desk.merged(desk.round("a"))
    announced = {
        a.connection: a.message.included for a in of(actions, act.Send) if isinstance(a.message, msg.Announce)
    }
    assert announced == {desk.lines["a"]: 1, desk.lines["b"]: None}, desk.story()


def test_a_base_that_lies_in_an_open_round_is_kept_until_it_is_merged() -> None:
    """Learner b sends from version 0 and then adopts version 1; nobody else holds version 0 any more."""
    desk = with_open_round("a", "b", num_fragments=1, sync_every_steps=4, quorum=2, grace_gamma=0.0)
    desk.contribute("a", 1)
    desk.join("d")
    desk.install("d")
    desk.boundary("d")
    desk.merged(desk.round("d"))
    desk.now += 10.0
    desk.boundary("a", adopted=[(0, 1)])
    number = desk.open_round(0)
    assert number == 2, desk.story()
    desk.contribute("b", 2, base=0)
    desk.boundary("d", adopted=[(0, 1)])
    actions = desk.boundary("b", adopted=[(0, 1)])
    assert not of(actions, act.Retire), desk.story()
    (merge,) = of(desk.contribute("a", 2, base=1), act.Merge)
    actions = desk.merged(merge)
    assert [r.version for r in of(actions, act.Retire)] == [0], desk.story()


def test_a_second_contribution_while_the_first_lies_in_its_round_is_refused() -> None:
    desk = with_open_round(quorum=3)
    desk.contribute("a", 1)
    before = desk.machine.ledger.merged, desk.machine.ledger.discarded
    desk.boundary("a", tokens=0, snapshots=[(0, 2)])
    assert desk.machine.refused == {"two_in_flight": 1}, desk.story()
    assert (desk.machine.ledger.merged, desk.machine.ledger.discarded) == before


def test_a_new_process_cannot_contribute_to_a_round_that_holds_the_old_ones_work() -> None:
    desk = with_open_round(quorum=3)
    desk.contribute("a", 1)
    desk.join("a")
    desk.install("a")
    desk.boundary("a", snapshots=[(0, 1)])
    actions = desk.send("a", 1)
    assert fate_of(actions)[0] == "late", desk.story()
    assert [d.object for d in of(actions, act.Discard)] == ["contribution.a.2.0.1"]
    assert desk.machine.merging.rounds.open[0].arrived["a"].incarnation == 1


def test_many_incarnations_leave_no_fates_behind() -> None:
    desk = with_open_round()
    for _ in range(50):
        desk.send("a", 99, finite=False)
        desk.join("a")
        desk.install("a")
    assert len(desk.machine.merging.fates) <= 2 * 3, desk.story()


# ---- breadth ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("others", "alarms"), [((), []), (("b",), ["narrow_merges"])])
def test_merges_of_one_learners_work_while_others_are_there_raise_one_alarm(
    others: tuple[str, ...], alarms: list[str]
) -> None:
    desk = Desk("a", *others, num_fragments=1, quorum=1)
    for version in range(12):
        for name in desk.lines:
            desk.boundary(name, adopted=[(0, version)] if version else [])
        while desk.open_round(0) is None:
            desk.now += 0.5
            desk.boundary("a")
            desk.take(ev.TimerFired(name="open"))
        desk.merged(desk.round("a"))
    assert [note["what"] for note in notes(desk.actions, "alarm")] == alarms, desk.story()


# ---- size ------------------------------------------------------------------------------------------------


def test_who_is_larger_than_the_median_is_cut_down_and_named_in_the_last_average_too() -> None:
    desk = with_open_round(quorum=3, clip="median")
    norms = {"a": 1.0, "b": 2.0, "c": 8.0}
    actions = [a for name, norm in norms.items() for a in desk.contribute(name, 1, norm=norm)]
    (merge,) = of(actions, act.Merge)
    assert [part.scale for part in merge.parts] == [None, None, 0.25], desk.story()
    assert notes(actions, "clipped") == [{"fragment": 0, "version": 1, "scales": {"c": 0.25}}]
    desk.merged(merge)
    desk.take(ev.StopRequested(mode="finish"))
    (finish,) = {tuple(m.rounds) for name in desk.lines for m in desk.heard(name, msg.Finish)}
    for name, norm in norms.items():
        for p, number in enumerate(finish):
            desk.send(name, number, p, base=desk.machine.merging.versions[p], norm=norm)
    actions = [a for name in desk.lines for a in desk.say(name, msg.HandedIn())]
    last = of(actions, act.Merge)
    assert [[part.scale for part in merge.parts] for merge in last] == 2 * [[None, None, 0.25]], desk.story()
