"""Who was alive, when."""

import itertools

import pytest
from fake_run import FREEZE_FOR_S, FREEZE_S, JOIN_S, KILL_S

from farflung.report.folder import Folder
from farflung.report.spans import alive, share_with_at_least, step_intervals, subtract, union


def test_a_killed_learner_is_dead_then_joining_then_training(decoupled: Folder) -> None:
    spans = alive(decoupled.history, "learner-1")
    assert [s.state for s in spans] == ["joining", "training", "dead", "joining", "training"]
    assert (spans[2].start_s, spans[2].end_s) == (KILL_S, JOIN_S)


def test_spans_never_overlap(decoupled: Folder, diloco: Folder) -> None:
    for history in (decoupled.history, diloco.history):
        for learner in history.learners:
            for a, b in itertools.pairwise(alive(history, learner)):
                assert a.end_s <= b.start_s + 1e-9, (learner, a, b)


def test_a_lockstep_learner_waits_while_the_dead_one_is_waited_for(diloco: Folder) -> None:
    waits = [s for s in alive(diloco.history, "learner-0") if s.state == "waiting"]
    assert sum(s.end_s - s.start_s for s in waits) > 8


def test_frozen_time_is_no_step_time(decoupled: Folder) -> None:
    inside = [
        (a, b)
        for a, b in step_intervals(decoupled.history, "learner-2")
        if a < FREEZE_S + FREEZE_FOR_S - 0.01 and b > FREEZE_S + 0.01
    ]
    assert inside == []


@pytest.mark.parametrize(("k", "share"), [(1, 1.0), (2, 0.5), (3, 0.0)])
def test_share_counts_learners_that_train_at_once(k: int, share: float) -> None:
    assert share_with_at_least(k, [[(0, 10)], [(5, 12)]], 0, 10) == share


def test_share_of_nothing_is_zero() -> None:
    assert share_with_at_least(1, [], 0, 10) == 0
    assert share_with_at_least(1, [[(0, 1)]], 5, 5) == 0


def test_union_and_subtract_are_complements() -> None:
    busy = union([(4, 6), (1, 2), (5, 7)])
    assert busy == [(1, 2), (4, 7)]
    assert union([*busy, *subtract((0, 10), busy)]) == [(0, 10)]
