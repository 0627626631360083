"""A gossip learner's round: steps, an offer, a mix; and all learners name the same meetings."""

import pytest
from peer_helpers import BYTES, Peer, gossip_policy, missed, offer, slots
from protocol_helpers import of, posted, said

from farflung.core import mixing
from farflung.protocol import actions as act
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.testing.crowd import Crowd


def last(peer: Peer, kind: str) -> dict:
    """The newest mailbox command of this kind."""
    commands = [r.data["command"] for r in peer.tape.records if r.type == "Post"]
    return [c for c in commands if c["type"] == kind][-1]


def test_a_round_ends_after_its_steps_and_offers_there() -> None:
    peer = Peer().among("ab")
    assert last(peer, "RunUntil")["step"] == 2
    snapshot = last(peer, "Snapshot")
    assert (snapshot["round"], snapshot["at_step"]) == (0, 2), peer.story()


def test_a_vector_goes_straight_to_the_partner() -> None:
    (sent,) = of(Peer().among("ab").stand(), act.Offer)
    assert (sent.object, sent.partner, sent.address, sent.num_bytes) == (offer("a", "b"), "b", "//b", BYTES)


def test_a_round_is_mixed_when_theirs_is_here_and_ours_was_acknowledged() -> None:
    peer = Peer().among("ab")
    peer.stand()
    assert not posted(peer.arrive(offer()), box.Mix), peer.story()
    (mix,) = posted(peer.acknowledge(), box.Mix)
    assert (mix.round, mix.parts, mix.at_step) == (0, [(peer.meeting.partners["b"].slot, 0.5)], 2)


def test_an_acknowledgement_alone_is_not_enough() -> None:
    peer = Peer().among("ab")
    peer.stand()
    assert not posted(peer.acknowledge(), box.Mix), peer.story()
    assert posted(peer.arrive(offer()), box.Mix), peer.story()


def test_the_next_round_begins_where_the_last_one_was_mixed() -> None:
    peer = Peer().among("ab")
    actions = peer.meet()
    assert [r.step for r in posted(actions, box.RunUntil)] == [4], peer.story()
    assert [(s.round, s.at_step) for s in posted(actions, box.Snapshot)] == [(1, 4)]


def test_the_hub_is_told_of_the_end_of_a_round() -> None:
    peer = Peer().among("ab")
    (report,) = said(peer.meet(), msg.Boundary)
    assert report.mixed is not None, peer.story()
    assert (report.mixed.epoch, report.mixed.round, report.mixed.correction) == (1, 0, 0.5)
    assert report.mixed.meetings == [msg.Meeting(partner="b", distance=1.0)]
    assert report.snapshots == []


def test_weights_are_alpha_times_the_matchings_and_parts_are_in_order_of_names() -> None:
    peer = Peer(matching="ring", mixing=0.6).among("abc")
    peer.stand()
    for partner in "cb":
        peer.arrive(offer(partner))
        actions = peer.acknowledge(partner)
    (mix,) = posted(actions, box.Mix)
    partners = peer.meeting.partners
    assert list(partners) == ["b", "c"]
    assert mix.parts == [(partners[n].slot, pytest.approx(0.2)) for n in "bc"], peer.story()


def test_distances_belong_to_those_who_were_mixed_in() -> None:
    peer = Peer(matching="ring").among("abcd")
    peer.stand()
    peer.refuse("late", "b")
    peer.arrive(offer("d"))
    assert slots(peer.acknowledge("d")) == [peer.meeting.partners["d"].slot]
    (report,) = said(peer.mix(0, 3.0), msg.Boundary)
    assert report.mixed is not None
    assert [(m.partner, m.missed, m.distance) for m in report.mixed.meetings] == [
        ("b", "late", 0.0), ("d", "", 3.0),
    ], peer.story()  # fmt: skip


def test_a_vector_that_is_not_finite_is_a_missed_meeting() -> None:
    peer = Peer().among("ab")
    peer.stand()
    peer.arrive(offer())
    peer.acknowledge()
    assert missed(peer.mix(0, None)) == {"b": "not_finite"}, peer.story()


# ---- steps, overlap, idling ------------------------------------------------------------------------------


def test_a_learner_may_have_its_own_number_of_steps() -> None:
    peer = Peer(local_steps={"a": 5}).among("ab")
    assert (last(peer, "RunUntil")["step"], last(peer, "Snapshot")["at_step"]) == (5, 5)


@pytest.mark.parametrize("overlap", [1, 2])
def test_with_overlap_the_offer_is_made_so_many_steps_before_the_end(overlap: int) -> None:
    peer = Peer(overlap_steps=overlap).among("ab")
    assert last(peer, "Snapshot")["at_step"] == 2 - overlap
    assert last(peer, "RunUntil")["step"] == 2, peer.story()


def test_a_partner_that_comes_within_the_overlap_is_not_waited_for() -> None:
    peer = Peer(overlap_steps=1).among("ab")
    peer.take_offer()
    peer.arrive(offer())
    (mix,) = posted(peer.acknowledge(), box.Mix)
    assert mix.at_step == 2
    mixed = box.Mixed(round=0, steps=2, tokens=20, distances=[1.0], correction=0.5)
    actions = peer.boundary(mixed=mixed)
    assert [r.step for r in posted(actions, box.RunUntil)] == [4], peer.story()
    assert not [
        r for r in peer.tape.records if r.type == "SetTimer" and r.data["name"] == "meet" and r.data["at_s"]
    ]


def test_who_idles_a_round_neither_offers_nor_waits() -> None:
    idle = next(r for r in range(20) if not mixing.partners("random", 7, r, mixing.Members.of("abc"), 0))
    peer = Peer().training()
    actions = peer.hear(msg.Epoch(
        number=1, round=idle, seed=7, members=[msg.Peer(name=n, address=n) for n in "abc"]
    ))  # fmt: skip
    assert not posted(actions, box.Snapshot), peer.story()
    (mix,) = posted(actions, box.Mix)
    assert (mix.round, mix.parts, mix.at_step) == (idle, [], 2)


def test_one_learner_alone_goes_on_by_itself() -> None:
    peer = Peer().training()
    assert (
        slots(peer.hear(msg.Epoch(number=1, round=0, seed=7, members=[msg.Peer(name="a", address=None)])))
        == []
    )


# ---- all sides of a meeting ------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["abcd", "abcdefg"], ids=len)
@pytest.mark.parametrize("matching", mixing.MATCHINGS)
def test_both_sides_name_the_same_epoch_round_and_pair(matching: str, names: str) -> None:
    policy = gossip_policy(matching=matching, local_steps={"b": 3})
    sides: dict[str, set[tuple]] = {name: set() for name in names}

    def hear(name: str, message: msg.LearnerMessage) -> None:
        mixed = message.mixed if isinstance(message, msg.Boundary) else None
        for meeting in mixed.meetings if mixed is not None else []:
            sides[name].add((mixed.epoch, mixed.round, meeting.partner, meeting.missed))

    crowd = Crowd(policy, names, hear).run(rounds=8)
    assert crowd.missed == 0
    assert crowd.meetings > 0
    for name in names:
        for e, r, partner, why in sides[name]:
            assert (e, r, name, why) in sides[partner], (name, partner)


def test_a_learner_that_idles_gets_ahead_and_its_partners_vector_comes_early() -> None:
    crowd = Crowd(gossip_policy(), "abcde")
    admits = []
    machine = crowd.machines["a"]
    handle = machine.handle

    def watched(event, now):
        actions = handle(event, now)
        admits.extend(a for a in actions if isinstance(a, act.Admit) and a.slot is not None)
        machine.validate()
        return actions

    machine.handle = watched  # type: ignore[method-assign]
    crowd.run(rounds=20)
    assert crowd.missed == 0
    assert {a.slot for a in admits} == {1, 2}  # both turns
