"""A gossip learner from its first epoch to its last round: epochs, the link, starting over, the hub's averages."""

import pytest
from peer_helpers import BYTES, Peer, epoch, missed, offer, slots
from protocol_helpers import notes, of, posted, said

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg


def limits(peer: Peer) -> list[tuple[int | None, str]]:
    """Every step at which the trainer was told to stand, and why."""
    commands = [r.data["command"] for r in peer.tape.records if r.type == "Post"]
    return [(c["step"], c["reason"]) for c in commands if c["type"] == "RunUntil"]


def shown(peer: Peer, round: int, final: bool = False) -> list[act.LearnerAction]:
    return peer.report(box.Shown(round=round, final=final, steps=2, tokens=20, num_bytes=BYTES))


# ---- epochs ----------------------------------------------------------------------------------------------


def test_not_a_step_is_taken_before_it_is_known_with_whom() -> None:
    peer = Peer().training()
    assert {step for step, _ in limits(peer)} == {0}, peer.story()
    assert limits(peer)[-1][1] == "waiting for partners"
    peer.hear(epoch("ab"))
    assert limits(peer)[-1] == (2, "round 0: waiting for b")


def test_an_epoch_takes_effect_at_the_next_round_and_brings_rounds_together() -> None:
    peer = Peer().among("ab")
    peer.stand()
    assert not peer.hear(epoch("ab", number=2, round=9)), peer.story()
    peer.arrive(offer())
    peer.acknowledge()
    actions = peer.mix(0, 1.0)
    assert [s.round for s in posted(actions, box.Snapshot)] == [9], peer.story()
    peer.step = 2
    (sent,) = of(peer.stand(9), act.Offer)
    assert sent.object == offer("a", "b", round=9, number=2)


def test_a_learner_that_is_ahead_of_an_epoch_goes_on_from_its_own_round() -> None:
    peer = Peer().among("ab", round=5)
    peer.hear(epoch("ab", number=2, round=3))
    assert [s.round for s in posted(peer.meet(5), box.Snapshot)] == [6], peer.story()


@pytest.mark.parametrize("number", [1, 2])
def test_an_epoch_that_is_not_newer_changes_nothing(number: int) -> None:
    """The hub repeats the newest after a reattachment."""
    peer = Peer().among("ab", number=2)
    assert not peer.hear(epoch("a", number=number, round=7)), peer.story()
    assert [s.round for s in posted(peer.meet(number=2), box.Snapshot)] == [1]


def test_a_learner_that_is_no_member_meets_nobody_and_goes_on() -> None:
    peer = Peer().among("ab")
    peer.hear(epoch("bc", number=2))
    assert slots(peer.meet()) == [], peer.story()


def test_a_joiner_begins_in_the_round_and_epoch_that_it_is_told() -> None:
    peer = Peer().among("ab", number=4, round=12)
    peer.step = 0
    (sent,) = of(peer.stand(12), act.Offer)
    assert sent.object == offer("a", "b", round=12, number=4)


def test_an_epoch_meant_for_a_life_before_is_not_taken() -> None:
    peer = Peer().among("ab")
    peer.hear(msg.Stop(reason="reset"))
    peer.hear(epoch("ab", number=2))
    assert peer.peer.epoch is None, peer.story()


# ---- without a hub ---------------------------------------------------------------------------------------


def test_learners_go_on_meeting_while_the_hub_is_away() -> None:
    peer = Peer().among("ab")
    peer.take(ev.LinkDown())
    for round in range(4):
        assert [s.round for s in posted(peer.meet(round), box.Snapshot)] == [round + 1], peer.story()


def test_the_hub_is_told_of_every_round_once_it_is_back() -> None:
    peer = Peer().among("ab")
    peer.take(ev.LinkDown())
    for round in range(2):
        peer.meet(round)
    (join,) = said(peer.take(ev.LinkUp()), msg.Join)
    assert (join.incarnation, join.address) == (1, "//a")
    peer.welcome()
    actions = peer.hear(msg.Reattached(installed=True, sequence=1, syncer_step=0))
    reports = said(actions, msg.Boundary)
    assert [r.sequence for r in reports] == list(range(2, 7)), peer.story()
    assert [r.mixed.round for r in reports if r.mixed is not None] == [0, 1]


# ---- trouble with numbers --------------------------------------------------------------------------------


def test_a_learner_whose_own_parameters_are_not_finite_offers_nothing_and_starts_over() -> None:
    peer = Peer().among("ab")
    peer.boundary()
    actions = peer.take_offer(finite=False)
    assert not of(actions, act.Offer), peer.story()
    assert notes(actions, "start_over")
    assert [j.incarnation for j in said(actions, msg.Join)] == [None]


def test_a_learner_that_starts_over_is_early_until_its_own_epoch() -> None:
    """The old one names it too; the hub has another by then, and a third with the new life."""
    peer = Peer().among("ab")
    peer.boundary()
    peer.take_offer(finite=False)
    assert peer.knock(offer(round=1)).refusal == "early"
    peer.step = 0
    peer.welcome(2)
    peer.install([0])
    assert peer.peer.meeting is None, peer.story()
    peer.hear(epoch("ab", number=3, round=4))
    assert peer.meeting.round == 4


def test_who_starts_over_lets_go_of_everything() -> None:
    peer = Peer(matching="ring").among("abc")
    peer.stand()
    peer.knock(offer("c"))
    peer.knock(offer("b", round=1))
    actions = peer.hear(msg.Stop(reason="reset"))
    assert {c.object for c in of(actions, act.CancelUpload)} == {offer("a", "b"), offer("a", "c")}
    assert {u.object for u in of(actions, act.Unexpect)} == {offer("c"), offer("b", round=1)}, peer.story()
    assert not peer.acknowledge()
    assert not peer.take(ev.TimerFired(name="meet"))


def test_the_end_of_a_round_from_before_a_new_start_is_not_told() -> None:
    peer = Peer().among("ab")
    peer.stand()
    peer.refuse("late")
    peer.hear(msg.Stop(reason="reset"))
    assert not peer.mix(0), peer.story()


# ---- averages at the hub ---------------------------------------------------------------------------------


def test_an_invitation_shows_parameters_while_training_goes_on() -> None:
    peer = Peer().among("ab")
    actions = peer.hear(msg.Invite(fragment=0, round=3))
    assert [(s.round, s.final) for s in posted(actions, box.Show)] == [(3, False)]
    assert not posted(actions, box.RunUntil), peer.story()
    (upload,) = of(shown(peer, 3), act.Upload)
    assert (upload.object, upload.fragment) == ("contribution.a.1.0.3", 1)
    (told,) = said(peer.take(ev.Uploaded(object=upload.object)), msg.Contribute)
    assert (told.round, told.base_version) == (3, 0)


def test_a_newer_invitation_takes_the_place_of_one_that_is_on_its_way() -> None:
    peer = Peer().among("ab")
    peer.hear(msg.Invite(fragment=0, round=3))
    shown(peer, 3)
    actions = peer.hear(msg.Invite(fragment=0, round=4))
    assert [c.object for c in of(actions, act.CancelUpload)] == ["contribution.a.1.0.3"], peer.story()
    assert not said(peer.take(ev.Uploaded(object="contribution.a.1.0.3")), msg.Contribute)


def test_an_average_leaves_the_learners_parameters_alone() -> None:
    peer = Peer().among("ab")
    assert not peer.announce(1), peer.story()
    peer.hear(msg.Invite(fragment=0, round=2))
    shown(peer, 2)
    (told,) = said(peer.take(ev.Uploaded(object="contribution.a.1.0.2")), msg.Contribute)
    assert told.base_version == 1


def test_what_the_hub_may_not_have_heard_is_repeated() -> None:
    peer = Peer().among("ab")
    peer.hear(msg.Invite(fragment=0, round=3))
    shown(peer, 3)
    peer.take(ev.LinkDown())
    assert not said(peer.take(ev.Uploaded(object="contribution.a.1.0.3")), msg.Contribute)
    peer.take(ev.LinkUp())
    peer.welcome()
    actions = peer.hear(msg.Reattached(installed=True, sequence=0, syncer_step=0))
    assert [c.round for c in said(actions, msg.Contribute)] == [3], peer.story()


# ---- the end ---------------------------------------------------------------------------------------------


def hand_in(peer: Peer) -> list[act.LearnerAction]:
    return peer.hear(msg.Finish(versions=[0], rounds=[5]))


def test_the_budgets_end_cuts_the_round_short_and_hands_the_live_parameters_in() -> None:
    peer = Peer().among("ab")
    peer.stand()
    actions = hand_in(peer)
    assert [r.step for r in posted(actions, box.RunUntil)] == [0]
    assert [(s.round, s.final) for s in posted(actions, box.Show)] == [(5, True)], peer.story()
    assert [c.object for c in of(actions, act.CancelUpload)] == [offer("a", "b")]
    shown(peer, 5, final=True)
    actions = peer.take(ev.Uploaded(object="contribution.a.1.0.5"))
    assert [type(m) for m in said(actions, msg.Contribute | msg.HandedIn)] == [msg.Contribute, msg.HandedIn]


def test_no_round_begins_after_the_hand_in() -> None:
    peer = Peer().among("ab")
    hand_in(peer)
    assert not posted(peer.hear(epoch("ab", number=2)), box.Snapshot)
    assert not posted(peer.boundary(), box.Snapshot), peer.story()


def test_a_repeated_finish_changes_nothing() -> None:
    peer = Peer().among("ab")
    hand_in(peer)
    assert not posted(hand_in(peer), box.Show), peer.story()


def test_parameters_asked_for_before_the_end_are_not_handed_in_as_final() -> None:
    peer = Peer().among("ab")
    peer.hear(msg.Invite(fragment=0, round=4))
    hand_in(peer)
    assert not of(shown(peer, 4), act.Upload), peer.story()
    assert of(shown(peer, 5, final=True), act.Upload)


def test_a_learner_that_saves_leaves_its_round() -> None:
    peer = Peer().among("ab")
    peer.stand()
    actions = peer.hear(msg.Suspend())
    assert posted(actions, box.Save)
    assert [c.object for c in of(actions, act.CancelUpload)] == [offer("a", "b")], peer.story()
    assert peer.knock(offer()).refusal == "late"
    assert said(peer.report(box.SaveDone(step=2)), msg.Saved)


def test_a_learner_that_goes_on_from_a_save_file_waits_for_its_epoch() -> None:
    peer = Peer()
    peer.report(box.Ready(
        learner="a", fingerprint="f", layout="{}", method="m", run="by-hand", incarnation=1, held=[2], step=7,
    ))  # fmt: skip
    assert limits(peer)[-1] == (7, "waiting for partners")
    (join,) = said(peer.take(ev.LinkUp()), msg.Join)
    assert (join.incarnation, join.held) == (1, [2])
    peer.welcome()
    peer.hear(msg.Reattached(installed=True, sequence=0, syncer_step=0))
    peer.step = 7
    peer.hear(epoch("ab", number=5, round=20))
    assert limits(peer)[-1] == (9, "round 20: waiting for b"), peer.story()
    peer.stand(20)
    assert missed([*peer.refuse("late", round=20, number=5), *peer.mix(20)]) == {"b": "late"}


@pytest.mark.parametrize(("worked", "ends_at"), [(0, 9), (1, 8), (2, 7), (3, 7)])
def test_a_round_that_a_stop_broke_off_still_ends_after_h_steps(worked: int, ends_at: int) -> None:
    """So a run that was stopped and resumed mixes at the steps where one that was not does."""
    peer = Peer()
    peer.report(box.Ready(
        learner="a", fingerprint="f", layout="{}", method="m", run="by-hand", incarnation=1, held=[2], step=7,
        worked=worked,
    ))  # fmt: skip
    peer.take(ev.LinkUp())
    peer.welcome()
    peer.hear(msg.Reattached(installed=True, sequence=0, syncer_step=0))
    actions = peer.hear(epoch("ab", number=5, round=20))
    assert [s.at_step for s in posted(actions, box.Snapshot)] == [ends_at], peer.story()
    assert limits(peer)[-1] == (ends_at, "round 20: waiting for b")
    peer.step = ends_at - 1
    peer.take_offer(20)
    peer.refuse("late", round=20, number=5)
    actions = peer.mix(20)
    assert [s.at_step for s in posted(actions, box.Snapshot)] == [ends_at + 2], peer.story()


def test_a_learner_that_starts_over_begins_a_whole_round() -> None:
    peer = Peer()
    peer.report(box.Ready(
        learner="a", fingerprint="f", layout="{}", method="m", run="by-hand", incarnation=1, held=[2], step=7,
        worked=1,
    ))  # fmt: skip
    peer.take(ev.LinkUp())
    peer.welcome()
    peer.hear(msg.Stop(reason="reset"))
    peer.step = 0
    peer.welcome(2)
    peer.install([0])
    peer.hear(epoch("ab", number=5, round=20))
    assert peer.meeting.ends_at == 2, peer.story()
