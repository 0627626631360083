"""Every failure keeps its first cause and tells how it ended."""

from dataclasses import replace

import pytest
from fake_run import JOIN_S, KILL_S, LAPSED_S, PROVED_S

from farflung.report.folder import Folder
from farflung.report.history import History, Note, Trouble
from farflung.report.outages import outages
from farflung.report.story import proven, story


def test_a_kill_is_followed_to_the_first_merged_contribution(decoupled: Folder) -> None:
    kill = outages(decoupled.history)[0]
    assert (kill.learner, kill.cause, kill.planned) == ("learner-1", "kill (fault plan)", True)
    times = [kill.began_s, kill.noticed_s, kill.lost_s, kill.proved_s, kill.joined_s, kill.merged_s]
    assert times == pytest.approx([KILL_S, LAPSED_S, JOIN_S, PROVED_S, PROVED_S, 28.2])


def test_without_a_fault_plan_the_first_evidence_is_the_cause(decoupled: Folder) -> None:
    metrics = [m for m in decoupled.history.metrics if m["kind"] not in ("fault", "process")]
    (outage,) = outages(replace(decoupled.history, metrics=metrics))
    assert outage.cause == "disconnected: connection reset"
    assert outage.lost_reason == "fenced by a newer process"


def test_a_link_that_mends_itself_is_no_failure() -> None:
    history = History(
        troubles=[Trouble(1.0, "a", "link down")], notes=[Note(0.0, "joined", {"learner": "a"})]
    )
    assert outages(history) == []


def test_a_reattached_learner_lost_nothing() -> None:
    notes = [
        Note(0.0, "joined", {"learner": "a", "incarnation": 1, "role": "birth"}),
        Note(5.0, "lost", {"learner": "a", "reason": "lease lapsed"}),
        Note(8.0, "joined", {"learner": "a", "incarnation": 1, "role": "reattach"}),
    ]
    history = History(notes=notes, last_s=10.0)
    assert "reattached as incarnation 1, nothing lost (3.0 s after)" in story(history)[-2].text


def test_a_silence_that_ends_is_told_with_its_length() -> None:
    notes = [
        Note(0.0, "joined", {"learner": "a", "incarnation": 1, "role": "birth"}),
        Note(5.0, "lease_lapsed", {"learner": "a"}),
        Note(9.0, "lease_renewed", {"learner": "a"}),
    ]
    texts = [line.text for line in story(History(notes=notes, last_s=10.0))]
    assert "a: silent: lease lapsed" in texts
    assert "a: heard again: lease renewed (4.0 s after)" in texts


def test_a_second_death_before_the_first_merge_is_a_failure_of_its_own() -> None:
    kinds = [(1, "joined"), (2, "lost"), (3, "joined"), (4, "lost"), (5, "joined"), (6, "rejoined")]
    notes = [Note(t, kind, {"learner": "a", "role": "rejoin"}) for t, kind in kinds]
    found = outages(History(notes=notes, last_s=9.0))
    assert [(o.lost_s, o.joined_s, o.merged_s) for o in found] == [(2, 3, None), (4, 5, 6)]


def test_exits_after_the_end_are_no_failures(decoupled: Folder) -> None:
    assert all(o.learner != "learner-0" for o in outages(decoupled.history))


@pytest.mark.parametrize(
    ("proof", "good"),
    [
        ({"params_equal": True, "inner_equal": None, "lr_equal": None, "cursor_equal": True}, True),
        ({"params_equal": True, "inner_equal": False, "lr_equal": True, "cursor_equal": True}, False),
        ({}, False),
    ],
)
def test_a_proof_needs_equal_parameters_and_no_difference(proof: dict[str, bool], good: bool) -> None:
    assert proven(proof) is good


def test_the_story_names_what_was_proved_and_by_whom(decoupled: Folder) -> None:
    text = "\n".join(line.text for line in story(decoupled.history))
    assert "rejoin proved by digest: parameters = the syncer's, inner optimizer = learner-0's" in text
    assert "first contribution merged (8.2 s after)" in text
    assert "its lease never lapsed" in text
    assert text.endswith("run finished")
