from typing import Any

import pytest
from protocol_helpers import Desk, notes, of, said

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import messages as msg


def two_training(**changes: Any) -> Desk:
    """Learners a and b train; contributions of both were merged into version 1 of fragment 0."""
    desk = Desk("a", "b", **changes)
    for name in ("a", "b"):
        desk.boundary(name)
    desk.merged(desk.round("a", "b"))
    for name in ("a", "b"):
        desk.boundary(name, adopted=[(0, 1)])
    return desk


# ---- who is turned away ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "wrong"),
    [
        ("protocol", {"protocol": 999}),
        ("run", {"run": "another"}),
        ("method", {"method": "diloco:00000000"}),
        ("fingerprint", {"fingerprint": "another model"}),
        ("fenced", {"incarnation": 7}),
    ],
)
def test_a_foreign_join_is_refused_by_name_and_changes_nothing(reason: str, wrong: dict[str, Any]) -> None:
    desk = two_training()
    before = desk.books()
    actions = desk.join("stranger", **wrong)
    (refused,) = said(actions, msg.Refused)
    assert refused.reason == reason, desk.story()
    assert refused.detail
    assert of(actions, act.HangUp)
    assert desk.machine.refused == {reason: 1}
    assert "stranger" not in desk.machine.membership.members
    assert desk.books() == before


def test_a_fenced_incarnation_may_not_come_back() -> None:
    desk = two_training()
    desk.join("a")  # a new process of a: incarnation 2
    before = desk.books()
    (refused,) = said(desk.join("a", incarnation=1), msg.Refused)
    assert refused.reason == "fenced", desk.story()
    assert "newest: 2" in refused.detail
    assert desk.books() == before


def test_a_new_process_stops_the_old_one() -> None:
    desk = two_training()
    old = desk.lines["a"]
    stops = [a for a in of(desk.join("a"), act.Send) if a.connection == old]
    assert [s.message for s in stops] == [msg.Stop(reason="fenced")], desk.story()


def test_a_message_before_join_is_refused_and_its_connection_closed() -> None:
    desk = two_training()
    before = desk.books()
    actions = desk.take(ev.MessageArrived(connection=99, message=msg.HandedIn()))
    assert [a.connection for a in of(actions, act.HangUp)] == [99], desk.story()
    assert desk.machine.refused == {"not_joined": 1}
    assert desk.books() == before


@pytest.mark.parametrize(
    "message",
    [
        msg.Contribute(fragment=2, round=1, base_version=0, steps=1, tokens=1, num_bytes=4),
        msg.Contribute(fragment=-1, round=1, base_version=0, steps=1, tokens=1, num_bytes=4),
        msg.Boundary(sequence=99, step=9, adopted=[(2, 0)]),
        msg.Boundary(sequence=99, step=9, snapshots=[(-1, 1)]),
        msg.Boundary(sequence=99, step=9, adopted=[(0, 5)]),
        msg.Boundary(sequence=99, step=9, tokens=-1),
        msg.Boundary(sequence=99, step=9, tokens=1, step_s=float("nan")),
        msg.Installed(versions=[0], digests=["x"], inner_digest=None, lr=None, cursor=0, step=0),
    ],
)
def test_numbers_that_cannot_be_cost_the_connection_and_nothing_else(message: msg.LearnerMessage) -> None:
    desk = two_training()
    before = desk.books()
    actions = desk.say("a", message)
    assert [a.connection for a in of(actions, act.HangUp)] == [desk.lines["a"]], desk.story()
    assert desk.machine.refused == {"malformed": 1}
    assert desk.books() == before


# ---- birth -----------------------------------------------------------------------------------------------


def test_only_the_first_member_is_asked_to_seed() -> None:
    desk = Desk()
    assert said(desk.join("b"), msg.SeedRequest)
    assert not said(desk.join("a"), msg.SeedRequest), desk.story()


def test_the_next_member_seeds_when_the_seeder_dies() -> None:
    desk = Desk()
    desk.join("a")
    desk.join("b")
    actions = desk.say("a", msg.TrainerLost(reason="killed"))
    assert said(actions, msg.SeedRequest), desk.story()
    assert desk.machine.admission.seeder == "b"


def test_the_next_member_seeds_when_the_seeder_falls_silent() -> None:
    desk = Desk()
    desk.join("a")
    desk.join("b")
    desk.wait(6.0, "b")
    assert desk.heard("b", msg.SeedRequest), desk.story()


@pytest.mark.parametrize("found", [{"finite": False}, {"finite": True, "problem": "short: 3 of 4 bytes"}])
def test_broken_first_parameters_are_refused_and_no_version_is_born(found: dict[str, Any]) -> None:
    desk = Desk()
    desk.join("a")
    actions = desk.say("a", msg.Seeded(), digests=["x", "y"], **found)
    assert said(actions, msg.Stop) == [msg.Stop(reason="reset")], desk.story()
    assert not of(actions, act.CommitSeed)
    assert desk.machine.phase == "birth"
    assert desk.machine.merging.versions == [-1, -1]


def test_a_version_0_that_nobody_asked_for_changes_nothing() -> None:
    desk = two_training()
    before = desk.books()
    assert not of(desk.say("b", msg.Seeded(), finite=True, digests=["x", "y"]), act.CommitSeed), desk.story()
    assert desk.machine.refused == {"seed": 1}
    assert desk.books() == before


def test_everybody_installs_version_0_before_training() -> None:
    desk = Desk("a", "b")
    assert [m.versions for m in desk.heard("a", msg.Install)] == [[0, 0]]
    assert [m.versions for m in desk.heard("b", msg.Install)] == [[0, 0]]
    assert [p["role"] for p in desk.tape.notes("rejoin_proved")] == ["birth", "birth"], desk.story()


# ---- donors ----------------------------------------------------------------------------------------------


def rejoin(desk: Desk) -> str | None:
    """Learner c comes, is killed, and comes again; returns who is asked to donate."""
    asked = said(desk.join("c"), msg.Donate)
    return asked[0].transfer if asked else None


def test_a_healthy_member_is_the_donor() -> None:
    desk = two_training()
    desk.boundary("b")
    assert rejoin(desk) == "c.1.b", desk.story()  # most steps


def test_a_fresh_learner_is_never_a_donor() -> None:
    """Nothing of it was ever merged: its state may be that of a process that was born a second ago."""
    desk = Desk("a", "b")
    for name in ("a", "b"):
        desk.boundary(name)
    desk.merged(desk.round("a"))
    for _ in range(5):
        desk.boundary("b")
    desk.boundary("a", adopted=[(0, 1)])
    assert rejoin(desk) == "c.1.a", desk.story()


def test_a_restarted_learner_is_no_donor_until_its_first_merge() -> None:
    desk = two_training()
    desk.join("b")
    desk.say("b", msg.StateFailed(transfer="b.2.a", reason="busy"))
    desk.say("a", msg.StateFailed(transfer="b.2.a", reason="busy"))
    desk.install("b")
    desk.say("a", msg.TrainerLost(reason="killed"))
    desk.boundary("b")
    assert rejoin(desk) is None, desk.story()
    assert desk.heard("c", msg.Install)[-1].reason == "cold"


def test_a_learner_that_lags_two_versions_behind_is_no_donor() -> None:
    desk = two_training(quorum=1)
    for _ in range(2):
        desk.now += 5.0
        desk.boundary("a")
        number = desk.open_round(1)
        assert number is not None, desk.story()
        actions = desk.contribute("a", number, fragment=1, base=desk.machine.merging.versions[1])
        desk.now += 10
        actions += desk.take(ev.TimerFired(name="round.1", late_s=10.0))
        (merge,) = of(actions, act.Merge)
        desk.merged(merge)
        desk.boundary("a", adopted=[(1, merge.version)])
        desk.boundary("b")
        desk.merged(desk.round("a"))
        desk.boundary("a", adopted=[(0, desk.machine.merging.versions[0])])
    for _ in range(9):
        desk.boundary("b")  # it still holds the versions of the beginning
    assert rejoin(desk) == "c.1.a", desk.story()


def test_a_dead_donor_is_followed_by_the_next_and_then_by_a_cold_start() -> None:
    desk = two_training()
    desk.boundary("b")
    assert rejoin(desk) == "c.1.b"
    actions = desk.say("b", msg.TrainerLost(reason="killed"))
    assert [m.transfer for m in said(actions, msg.Donate)] == ["c.1.a"], desk.story()
    actions = desk.say("a", msg.StateFailed(transfer="c.1.a", reason="disk full"))
    (install,) = said(actions, msg.Install)
    assert (install.reason, install.state) == ("cold", None), desk.story()
    assert [n["donor"] for n in desk.tape.notes("donor_failed")] == ["b", "a"]


def test_a_donor_that_does_not_answer_within_a_lease_is_given_up() -> None:
    desk = two_training()
    rejoin(desk)
    desk.wait(4.0, "a", "b", "c")
    donor = desk.machine.admission.transfers
    (transfer,) = donor
    actions = desk.take(ev.TimerFired(name=f"donor.{transfer}"))
    assert said(actions, msg.Donate) or said(actions, msg.Install), desk.story()
    assert transfer not in desk.machine.admission.transfers


def offered(desk: Desk) -> str:
    """Learner c was offered the state of a donor."""
    transfer = rejoin(desk)
    assert transfer is not None
    donor = transfer.rpartition(".")[2]
    ready = msg.StateReady(transfer=transfer, num_bytes=8, digest="inner", lr=0.1, step=3, held=[1, 0])
    desk.say(donor, ready)
    return donor


def test_state_that_lies_at_the_syncer_outlives_its_donor() -> None:
    desk = two_training()
    donor = offered(desk)
    actions = desk.say(donor, msg.TrainerLost(reason="killed"))
    assert not of(actions, act.DiscardState), desk.story()
    assert not said(actions, msg.Donate)
    desk.install("c")
    assert desk.member("c").state == "training"


def test_donors_that_failed_one_process_are_asked_again_by_the_next() -> None:
    desk = two_training()
    rejoin(desk)
    for transfer in ("c.1.b", "c.1.a"):
        desk.say(transfer[-1], msg.StateFailed(transfer=transfer, reason="busy"))
    assert desk.heard("c", msg.Install)[-1].reason == "cold"
    desk.say("c", msg.TrainerLost(reason="killed"))
    assert rejoin(desk) is not None, desk.story()


# ---- proofs ----------------------------------------------------------------------------------------------


def test_a_proven_joiner_trains() -> None:
    desk = two_training()
    donor = offered(desk)
    actions = desk.install("c")
    (proof,) = notes(actions, "rejoin_proved")
    assert (proof["state"], proof["donor"]) == ("warm", donor)
    assert [n["learner"] for n in notes(actions, "joined")] == ["c"], desk.story()
    assert desk.member("c").state == "training"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"digests": ["0.1", "other"]}, "params_equal"),
        ({"inner_digest": "other"}, "inner_equal"),
        ({"lr": 0.2}, "lr_equal"),
        ({"cursor": 77}, "cursor_equal"),
    ],
)
def test_wrong_bits_after_an_installation_raise_an_alarm_and_a_reset(
    wrong: dict[str, Any], named: str
) -> None:
    desk = two_training()
    offered(desk)
    before = desk.books()
    actions = desk.install("c", **wrong)
    assert said(actions, msg.Stop) == [msg.Stop(reason="reset")], desk.story()
    (alarm,) = notes(actions, "alarm")
    assert named in alarm["detail"]
    assert desk.member("c").state == "gone"
    assert desk.books() == before


def test_an_installation_that_nobody_asked_for_changes_nothing() -> None:
    desk = two_training()
    before = desk.books()
    desk.install("a")
    assert desk.machine.refused == {"install": 1}, desk.story()
    assert desk.books() == before


def test_a_rejoin_gives_back_the_learners_own_cursor() -> None:
    desk = two_training()
    desk.boundary("a", cursor=1234)
    desk.join("a")
    desk.say("b", msg.StateFailed(transfer="a.2.b", reason="busy"))
    assert desk.heard("a", msg.Install)[-1].cursor == 1234, desk.story()


def test_a_rejoin_counts_at_its_first_merged_contribution() -> None:
    desk = two_training()
    desk.join("a")
    desk.say("b", msg.StateFailed(transfer="a.2.b", reason="busy"))
    desk.install("a")
    assert desk.machine.admission.rejoins == 0
    desk.boundary("a")
    desk.now += 5.0
    desk.boundary("b")
    number = desk.open_round(1)
    assert number is not None, desk.story()
    actions = desk.contribute("a", number, fragment=1)
    desk.now += 60.0
    actions += desk.take(ev.TimerFired(name="round.1", late_s=60.0))
    desk.merged(of(actions, act.Merge)[0])
    assert desk.machine.admission.rejoins == 1, desk.story()


# ---- reattachment ----------------------------------------------------------------------------------------


def test_a_learner_reattaches_with_its_incarnation_and_hears_what_it_missed() -> None:
    desk = two_training()
    desk.take(ev.Disconnected(connection=desk.lines["b"]))
    desk.now += 5.0
    desk.boundary("a")
    number = desk.open_round(1)
    assert number is not None, desk.story()
    actions = desk.contribute("a", number, fragment=1)
    desk.now += 60.0
    actions += desk.take(ev.TimerFired(name="round.1", late_s=60.0))
    desk.merged(of(actions, act.Merge)[0])
    actions = desk.join("b", incarnation=1)
    (reattached,) = said(actions, msg.Reattached)
    assert (reattached.installed, reattached.sequence) == (True, desk.sequences["b"]), desk.story()
    assert [(m.fragment, m.version) for m in said(actions, msg.Announce)] == [(1, 1)]
    assert desk.member("b").incarnation == 1


def test_a_repeated_boundary_counts_once() -> None:
    desk = two_training()
    before = desk.books()
    again = msg.Boundary(sequence=desk.sequences["a"], step=2, tokens=10, step_s=0.5)
    desk.say("a", again)
    assert desk.books() == before, desk.story()


def test_our_own_late_tick_is_nobodys_silence() -> None:
    desk = two_training()
    desk.now += 60.0
    actions = desk.take(ev.TimerFired(name="lease", late_s=60.0))
    assert not notes(actions, "lease_lapsed"), desk.story()
