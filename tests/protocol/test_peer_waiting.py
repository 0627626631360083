"""A gossip learner that waits for a partner: always with a deadline, and a missed meeting is no harm."""

import pytest
from peer_helpers import Peer, epoch, missed, offer, slots
from protocol_helpers import of, posted, said

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.protocol.peer import RETRY_S


def deadline(peer: Peer) -> float:
    """When the wait that begins now ends."""
    (timer,) = [r.data for r in peer.tape.records if r.type == "SetTimer" and r.data["name"] == "meet"][-1:]
    return timer["at_s"] - peer.now


def timed(peer: Peer, round: int, wait_s: float) -> None:
    """A whole round whose partner comes so long after the trainer stands."""
    peer.stand(round)
    peer.arrive(offer(round=round))
    peer.now += wait_s
    peer.acknowledge(round=round)
    peer.mix(round, 1.0)


def lapse(peer: Peer) -> list[act.LearnerAction]:
    """The deadline passes."""
    peer.now = peer.meeting.until_s
    return peer.take(ev.TimerFired(name="meet"))


# ---- deadlines -------------------------------------------------------------------------------------------


def test_the_wait_for_a_partner_has_a_deadline_at_most_a_lease_away() -> None:
    peer = Peer().among("ab")
    peer.now = 3.0
    peer.stand()
    assert deadline(peer) == peer.policy.lease_s == 5.0, peer.story()


def test_before_the_trainer_stands_there_is_no_deadline() -> None:
    peer = Peer(overlap_steps=2).among("ab")
    assert not of(peer.idle(taken=[]), act.SetTimer)
    assert peer.meeting.until_s is None


def test_the_deadline_ends_the_round_without_the_partner() -> None:
    peer = Peer().among("ab")
    peer.stand()
    actions = lapse(peer)
    assert slots(actions) == [], peer.story()
    assert [c.object for c in of(actions, act.CancelUpload)] == [offer("a", "b")]
    assert missed(peer.mix(0)) == {"b": "deadline"}


def test_the_deadline_ends_the_round_with_those_who_came() -> None:
    peer = Peer(matching="ring").among("abc")
    peer.stand()
    peer.arrive(offer("c"))
    peer.acknowledge("c")
    assert slots(lapse(peer)) == [peer.meeting.partners["c"].slot], peer.story()
    assert missed(peer.mix(0, 1.0)) == {"b": "deadline", "c": ""}


def test_a_partner_whose_vector_is_here_but_has_not_ours_is_missed_too() -> None:
    peer = Peer().among("ab")
    peer.stand()
    peer.arrive(offer())
    assert slots(lapse(peer)) == [], peer.story()


def test_a_deadline_of_an_earlier_round_ends_no_later_one() -> None:
    peer = Peer().among("ab")
    peer.meet()
    assert not peer.take(ev.TimerFired(name="meet")), peer.story()


def test_how_long_is_waited_may_be_given() -> None:
    peer = Peer(exchange_s=0.7).among("ab")
    peer.stand()
    assert deadline(peer) == 0.7


def test_a_usual_meeting_sets_how_long_is_waited_four_times_over() -> None:
    peer = Peer().among("ab")
    timed(peer, 0, 0.5)
    peer.stand(1)
    assert deadline(peer) == pytest.approx(2.0), peer.story()


def test_a_wait_lasts_a_rounds_steps_at_least() -> None:
    peer = Peer(sync_every_steps=12).among("ab")
    for _ in range(11):
        peer.boundary(step_s=0.1)
    peer.take_offer()
    peer.arrive(offer())
    peer.acknowledge()
    peer.mix(0, 1.0)
    for _ in range(11):
        peer.boundary(step_s=0.1)
    peer.take_offer(1)
    assert deadline(peer) == pytest.approx(1.2), peer.story()


def test_a_partner_that_was_missed_is_given_twice_the_time_and_never_more_than_a_lease() -> None:
    peer = Peer().among("ab")
    timed(peer, 0, 0.1)
    waits = []
    for round in range(1, 8):
        peer.stand(round)
        waits.append(round_off(deadline(peer)))
        lapse(peer)
        peer.mix(round)
    assert waits == [0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0], peer.story()


def round_off(seconds: float) -> float:
    return round(seconds, 6)


# ---- partners that do not come ---------------------------------------------------------------------------


def test_a_partner_that_is_lost_is_not_waited_for() -> None:
    peer = Peer().among("ab")
    peer.stand()
    assert slots(peer.hear(epoch("ac", number=2))) == [], peer.story()
    assert missed(peer.mix(0)) == {"b": "lost"}


def test_a_partner_that_was_met_already_is_mixed_in_although_it_is_lost_now() -> None:
    peer = Peer(matching="ring").among("abc")
    peer.stand()
    peer.arrive(offer("b"))
    peer.acknowledge("b")
    assert slots(peer.hear(epoch("a", number=2))) == [peer.meeting.partners["b"].slot], peer.story()


@pytest.mark.parametrize("refusal", ["late", "stranger", "ended", "size"])
def test_a_refusal_is_a_missed_meeting_at_once(refusal: str) -> None:
    peer = Peer().among("ab")
    peer.stand()
    assert slots(peer.refuse(refusal)) == [], peer.story()
    assert missed(peer.mix(0)) == {"b": refusal}


def test_a_missed_meeting_is_not_met_afterwards() -> None:
    peer = Peer(matching="ring").among("abc")
    peer.stand()
    peer.refuse("late")
    assert peer.knock(offer()).refusal == "late"
    assert not peer.acknowledge(), peer.story()
    assert not peer.refuse("early"), peer.story()


# ---- too early -------------------------------------------------------------------------------------------


def test_an_offer_that_is_early_is_made_again_after_growing_pauses() -> None:
    peer = Peer().among("ab")
    peer.stand()
    pauses = []
    for _ in range(len(RETRY_S) + 1):
        (timer,) = of(peer.refuse("early"), act.SetTimer)
        pauses.append(timer.at_s - peer.now)
        peer.now = timer.at_s
        (again,) = of(peer.take(ev.TimerFired(name=timer.name)), act.Offer)
        assert again.object == offer("a", "b")
    assert pauses == pytest.approx([*RETRY_S, RETRY_S[-1]]), peer.story()


def test_a_pause_of_an_earlier_round_makes_no_offer_in_a_later_one() -> None:
    """Found here: the same partner again, and the slot still held the vector of the round before."""
    peer = Peer().among("ab")
    peer.stand()
    (timer,) = of(peer.refuse("early"), act.SetTimer)
    lapse(peer)
    peer.mix(0)
    assert not peer.take(ev.TimerFired(name=timer.name)), peer.story()


def test_a_partner_that_is_early_for_ever_is_missed_at_the_deadline() -> None:
    peer = Peer().among("ab")
    peer.stand()
    peer.refuse("early")
    assert slots(lapse(peer)) == []
    assert missed(peer.mix(0)) == {"b": "deadline"}


# ---- through the hub -------------------------------------------------------------------------------------


def test_a_partner_that_cannot_be_reached_is_reached_through_the_hub() -> None:
    peer = Peer().among("ab")
    peer.stand()
    (upload,) = of(peer.refuse(""), act.Upload)
    assert (upload.object, upload.fragment) == (offer("a", "b"), 0), peer.story()
    peer.arrive(offer())
    actions = peer.acknowledge()
    assert [(r.partner, r.object) for r in said(actions, msg.Relay)] == [("b", upload.object)]
    assert not posted(actions, box.Mix), peer.story()  # it lies at the hub, not at b
    assert len(slots(peer.hear(msg.Relayed(partner="b", object=upload.object)))) == 1


def test_a_partner_that_nobody_can_dial_is_not_dialled() -> None:
    actions = Peer().among("ab", hidden="b").stand()
    assert not of(actions, act.Offer)
    assert [u.object for u in of(actions, act.Upload)] == [offer("a", "b")]


def test_a_partner_that_the_hub_cannot_reach_either_is_missed() -> None:
    peer = Peer().among("ab")
    peer.stand()
    peer.refuse("")
    peer.acknowledge()
    relayed = msg.Relayed(partner="b", object=offer("a", "b"), refusal="unreachable")
    assert slots(peer.hear(relayed)) == [], peer.story()
    assert missed(peer.mix(0)) == {"b": "unreachable"}


def test_a_relayed_vector_that_is_early_is_uploaded_again() -> None:
    peer = Peer().among("ab", hidden="b")
    peer.stand()
    peer.acknowledge()
    (timer,) = of(peer.hear(msg.Relayed(partner="b", object=offer("a", "b"), refusal="early")), act.SetTimer)
    assert of(peer.take(ev.TimerFired(name=timer.name)), act.Upload), peer.story()


def test_without_a_hub_an_unreachable_partner_is_missed_at_once() -> None:
    peer = Peer().among("ab")
    peer.take(ev.LinkDown())
    peer.stand()
    assert slots(peer.refuse("")) == [], peer.story()


def test_a_relay_that_fails_on_its_way_up_is_a_missed_meeting() -> None:
    peer = Peer().among("ab", hidden="b")
    peer.stand()
    assert slots(peer.refuse("")) == [], peer.story()


def relay(name: str) -> msg.Relay:
    return msg.Relay(partner="b", object=name, num_bytes=8)


def test_a_partners_vector_at_the_hub_is_fetched_and_acknowledged() -> None:
    peer = Peer().among("ab")
    (fetch,) = of(peer.hear(relay(offer())), act.FetchRelay)
    assert (fetch.object, fetch.slot) == (offer(), peer.meeting.partners["b"].slot)
    actions = peer.take(ev.Arrived(object=offer(), num_bytes=8))
    assert said(actions, msg.Relayed) == [msg.Relayed(partner="b", object=offer())], peer.story()


def test_a_partners_vector_that_came_straight_is_not_acknowledged_through_the_hub() -> None:
    assert not said(Peer().among("ab").arrive(offer()), msg.Relayed)


def test_a_vector_whose_acknowledgement_was_lost_may_come_again_through_the_hub() -> None:
    """It is here already, but its sender does not know."""
    peer = Peer().among("ab")
    peer.arrive(offer())
    (fetch,) = of(peer.hear(relay(offer())), act.FetchRelay)
    assert fetch.slot == peer.meeting.partners["b"].slot
    actions = peer.take(ev.Arrived(object=offer(), num_bytes=8))
    assert said(actions, msg.Relayed) == [msg.Relayed(partner="b", object=offer())], peer.story()


@pytest.mark.parametrize(("round", "refusal"), [(3, "early"), (1, "")])
def test_a_relay_is_admitted_by_the_same_rules(round: int, refusal: str) -> None:
    answers = said(Peer().among("ab").hear(relay(offer(round=round))), msg.Relayed)
    assert [a.refusal for a in answers] == ([refusal] if refusal else [])


def test_a_relay_that_cannot_be_fetched_is_told_to_its_sender() -> None:
    peer = Peer().among("ab")
    peer.hear(relay(offer()))
    answers = said(peer.take(ev.RelayFailed(object=offer(), reason="gone")), msg.Relayed)
    assert [(a.partner, a.refusal) for a in answers] == [("b", "gone")], peer.story()
