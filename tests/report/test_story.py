"""What happened, in words: who joined how, where a rejoin's parameters came from, why a learner left."""

from typing import Any

from farflung.report.gossip import Gossip
from farflung.report.history import History, Note, Step
from farflung.report.story import story

BIRTH = Note(1.0, "joined", {"learner": "a", "incarnation": 1, "role": "birth"})
PROOF = {"params_equal": True, "inner_equal": True, "lr_equal": True, "cursor_equal": True}


def texts(notes: list[Note], **more: Any) -> list[str]:
    return [line.text for line in story(History(notes=notes, last_s=20.0, ended_s=20.0, **more))]


def joins(learner: str, role: str, donor: str | None, t: float = 3.2) -> list[Note]:
    data = {"learner": learner, "incarnation": 1, "role": role}
    return [Note(t, "rejoin_proved", {**data, "donor": donor, **PROOF}), Note(t, "joined", data)]


def test_learners_that_came_a_moment_later_are_named_with_their_donor() -> None:
    told = texts([BIRTH, *joins("b", "late", "a"), *joins("c", "cold", None, 4.0)])
    assert "b joined later, with the state of a" in told
    assert "c joined later, without a donor: inner optimizer starts cold" in told


def test_many_late_learners_share_a_line() -> None:
    notes = [n for i in range(9) for n in joins(f"b-{i}", "late", "a", 3.0 + i)]
    told = [text for text in texts([BIRTH, *notes]) if "later" in text]
    assert told == ["9 learners more joined by now, later than the first"]


def test_a_late_join_after_a_failure_is_told_once() -> None:
    lost = Note(2.0, "lost", {"learner": "b", "incarnation": 1, "reason": "link"})
    told = [
        text for text in texts([BIRTH, lost, *joins("b", "late", "a")]) if "joined" in text and "b" in text
    ]
    assert "b joined later, with the state of a" not in told
    assert any("(late)" in text for text in told)


def test_in_gossip_the_parameters_of_a_rejoin_are_the_donors() -> None:
    lost = Note(2.0, "lost", {"learner": "b", "incarnation": 1, "reason": "link"})
    notes = [BIRTH, lost, *joins("b", "rejoin", "a")]
    hub, gossip = ("\n".join(texts(notes, gossip=g)) for g in (None, Gossip()))
    assert "parameters = the syncer's, inner optimizer = a's" in hub
    assert "parameters = a's, inner optimizer = a's" in gossip


def test_a_departure_tells_the_reason_that_came() -> None:
    steps = {"a": [Step(1.0, 10.0, 1, None, 1)]}
    left = [Note(5.0, "left", {"learner": "c", "reason": "interrupted"}),
            Note(6.0, "left", {"learner": "d", "reason": ""})]  # fmt: skip
    told = texts(left, steps=steps)
    assert "c: left (interrupted)" in told
    assert "d: left (no reason given)" in told
