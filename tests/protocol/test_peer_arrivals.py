"""What a gossip learner takes in: who is admitted into which slot, and who is refused by which name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_helpers import Peer, epoch, gossip_policy, offer, slots
from protocol_helpers import of, posted

from farflung.core import mixing
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.protocol.meeting import MAX_PARTNERS, slot
from farflung.testing.crowd import Crowd

# ---- refusals --------------------------------------------------------------------------------------------


def test_a_partners_vector_of_this_round_gets_its_slot_again_and_again() -> None:
    peer = Peer().among("ab")
    assert peer.knock(offer()).slot == peer.knock(offer()).slot == peer.meeting.partners["b"].slot


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        (offer(round=4, number=2), "early"),
        (offer(round=0, number=3), "early"),
        (offer(round=1, number=2), "late"),
        (offer(round=3, number=1), "late"),
        (offer("x", round=2, number=2), "late"),
        (offer("x", round=3, number=2), "stranger"),
        (offer("a", round=3, number=2), "stranger"),
        (offer("b", "c", round=2, number=2), "stranger"),
        ("offer.2.02.b.a", "stranger"),
        ("offer.2.٢.b.a", "stranger"),
        ("offer.2.-2.b.a", "stranger"),
        (f"offer.2.{'9' * 5000}.b.a", "stranger"),
        (f"offer.2.{'9' * 18}.b.a", "early"),
        ("offer.2.2.b", "stranger"),
        ("contribution.b.1.0.1", "stranger"),
        ("", "stranger"),
    ],
    ids=lambda text: text[:24] or "nothing",
)
def test_what_does_not_belong_here_is_refused_by_name(name: str, refusal: str) -> None:
    """Epoch 2, round 2 is under way; round 3 will be the next."""
    peer = Peer().among("ab", number=2, round=2)
    admit = peer.knock(name)
    assert (admit.slot, admit.refusal) == (None, refusal), peer.story()
    assert not peer.peer.arrivals.awaited


def test_before_its_first_epoch_everything_is_early() -> None:
    assert Peer().training().knock(offer()).refusal == "early"


def test_a_stranger_in_the_next_round_is_told_so() -> None:
    """Of three, one idles; who is not its partner in the next round does not meet it."""
    peer = Peer().among("abc")
    members = mixing.Members.of("abc")
    partners = mixing.partners("random", 7, 1, members, 0)
    others = set("bc") - {members.names[j] for j, _ in partners}
    assert others
    for name in others:
        assert peer.knock(offer(name, round=1)).refusal == "stranger"


def test_once_a_mix_is_posted_its_round_is_late() -> None:
    peer = Peer().among("ab")
    peer.stand()
    peer.refuse("late")
    assert peer.knock(offer()).refusal == "late"


def test_a_learner_that_hands_in_tells_its_partners_that_they_are_late() -> None:
    peer = Peer().among("ab")
    peer.hear(msg.Finish(versions=[0], rounds=[1]))
    assert peer.knock(offer()).refusal == peer.knock(offer(round=1)).refusal == "late"


# ---- early arrivals --------------------------------------------------------------------------------------


def test_a_vector_of_the_next_round_waits_in_another_slot_and_is_mixed_there() -> None:
    peer = Peer().among("ab")
    early = peer.knock(offer(round=1)).slot
    assert early not in (None, 0, peer.meeting.partners["b"].slot)
    peer.take(ev.Arrived(object=offer(round=1), num_bytes=8))
    peer.stand()
    assert not posted(peer.acknowledge(), box.Mix), peer.story()  # it is not of this round
    assert slots(peer.arrive(offer())) != [early]
    peer.mix(0, 1.0)
    peer.stand(1)
    assert slots(peer.acknowledge(round=1)) == [early], peer.story()


def test_a_vector_that_is_still_coming_when_its_round_begins_keeps_its_slot() -> None:
    peer = Peer().among("ab")
    early = peer.knock(offer(round=1)).slot
    peer.meet()
    assert peer.knock(offer(round=1)).slot == early
    peer.stand(1)
    peer.acknowledge(round=1)
    assert slots(peer.take(ev.Arrived(object=offer(round=1), num_bytes=8))) == [early], peer.story()


def test_a_new_epoch_lets_go_of_early_vectors_of_the_old_one() -> None:
    peer = Peer().among("ab")
    peer.knock(offer(round=1))
    actions = peer.hear(epoch("ab", number=2, round=1))
    assert [u.object for u in of(actions, act.Unexpect)] == [offer(round=1)], peer.story()
    assert peer.knock(offer(round=1)).refusal == "late"
    assert peer.knock(offer(round=1, number=2)).slot is not None


def test_a_vector_that_nobody_awaits_changes_nothing() -> None:
    peer = Peer().among("ab")
    peer.stand()
    peer.acknowledge()
    assert not peer.take(ev.Arrived(object=offer(), num_bytes=8)), peer.story()


def test_what_is_still_coming_is_let_go_of_when_its_meeting_failed_and_what_is_here_is_not_disowned() -> None:
    peer = Peer(matching="ring").among("abc")
    peer.knock(offer("b"))
    peer.arrive(offer("c"))
    peer.stand()
    peer.now = 60.0
    actions = peer.take(ev.TimerFired(name="meet"))
    assert [u.object for u in of(actions, act.Unexpect)] == [offer("b")], peer.story()


# ---- slots -----------------------------------------------------------------------------------------------


def test_slots_of_two_turns_differ_and_leave_room_for_values_to_install() -> None:
    for turn in range(4):
        used = [slot(t, place) for t in (turn, turn + 1) for place in range(MAX_PARTNERS)]
        assert sorted(used) == list(range(1, 2 * MAX_PARTNERS + 1))


@settings(max_examples=25, deadline=None)
@given(
    matching=st.sampled_from(sorted(mixing.MATCHINGS)),
    num=st.integers(2, 9),
    own=st.dictionaries(st.sampled_from("abcdefghi"), st.integers(1, 4), max_size=4),
)
def test_no_slot_ever_holds_two_vectors(matching: str, num: int, own: dict[str, int]) -> None:
    crowd = Crowd(gossip_policy(matching=matching, local_steps=own), "abcdefghi"[:num])
    for machine in crowd.machines.values():
        _validated(machine)
    crowd.run(rounds=6)
    assert crowd.missed == 0


def _validated(machine) -> None:
    handle = machine.handle

    def validated(event, now):
        actions = handle(event, now)
        machine.validate()
        return actions

    machine.handle = validated
