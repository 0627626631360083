"""The machines of many gossip learners in one process: no tensors, no links, and no hub but for its epoch."""

import time

import pytest
from peer_helpers import gossip_policy

from farflung.core import mixing
from farflung.protocol import messages as msg
from farflung.testing.crowd import Crowd

ROUNDS = 10


def crowd(num: int, **changes) -> Crowd:
    return Crowd(gossip_policy(sync_every_steps=1, **changes), [f"learner-{i:05}" for i in range(num)])


@pytest.mark.parametrize(("matching", "num"), [("random", 300), ("bandwidth", 300), ("exponential", 100)])
def test_hundreds_of_learners_meet_in_every_round(matching: str, num: int) -> None:
    many = crowd(num, matching=matching).run(ROUNDS)
    members = mixing.Members.of(list(many.machines))
    partners = sum(
        len(mixing.partners(matching, 7, round, members, i)) for round in range(ROUNDS) for i in range(num)
    )
    assert (many.meetings, many.missed) == (partners, 0)


def test_an_epoch_brings_the_rounds_of_all_together() -> None:
    many = crowd(50)
    many.run(3)
    many.tell(many.epoch(number=2, round=20))
    many.run(5)
    assert {m.peer.meeting.round for m in many.machines.values()} == {21}
    assert many.missed == 0


def test_a_report_names_every_meeting_once() -> None:
    reports: list[msg.RoundMixed] = []

    def hear(name: str, message: msg.LearnerMessage) -> None:
        if isinstance(message, msg.Boundary) and message.mixed is not None:
            reports.append(message.mixed)

    Crowd(gossip_policy(matching="complete"), "abcdef", hear).run(4)
    assert len(reports) == 24
    assert all(len({m.partner for m in r.meetings}) == 5 for r in reports)


@pytest.mark.slow
def test_ten_thousand_learners_take_ten_rounds_within_a_minute() -> None:
    """Of one core: others may use this machine, too."""
    began_s = time.process_time()
    many = crowd(10_000)
    born_s = time.process_time()
    many.run(ROUNDS)
    took_s = time.process_time() - born_s
    print(f"\n10,000 learners: {born_s - began_s:.1f} s for their birth, {took_s:.1f} s for {ROUNDS} rounds")
    print(f"{many.events} events")
    assert (many.meetings, many.missed) == (10_000 * ROUNDS, 0)
    assert took_s < 60.0
