"""Records become facts: repeats count once, bursts do not overlap, the wrong connection says nothing."""

import itertools
from typing import Any

import msgspec

from farflung.engine.layout import Layout
from farflung.protocol import actions, events, messages
from farflung.report.folder import Folder
from farflung.report.history import FragmentBytes, History, fragment_bytes, read_history
from farflung.report.spans import union
from farflung.tape import Record


def tape_of(*structs: tuple[float, Any]) -> History:
    records = [Record(0.0, "syncer", 0, "header", {"num_learners": 1, "policy": {"quorum": 1}})]
    for seq, (t, struct) in enumerate(structs, 1):
        kind = "action" if isinstance(struct, actions.Action) else "event"
        records.append(Record(t, "syncer", seq, kind, msgspec.to_builtins(struct)))
    return read_history(records)


def joined(connection: int = 1, incarnation: int | None = 3) -> events.MessageArrived:
    message = messages.Join(
        protocol=1, run="r", learner="a", fingerprint="f", layout="", method="m", incarnation=incarnation
    )
    return events.MessageArrived(connection=connection, message=message)


def boundary(sequence: int, connection: int = 1, step_s: float = 1.0, wait_s: float = 0.0) -> events.Event:
    message = messages.Boundary(
        sequence=sequence, step=sequence, tokens=10 if step_s else 0, step_s=step_s, wait_s=wait_s
    )
    return events.MessageArrived(connection=connection, message=message)


def test_a_step_lies_before_its_report() -> None:
    history = tape_of((0.0, joined()), (5.0, boundary(1, step_s=2.0)))
    assert [(s.start_s, s.end_s) for s in history.steps["a"]] == [(3.0, 5.0)]


def test_a_repeated_report_counts_once() -> None:
    history = tape_of((0.0, joined()), (1.0, boundary(1)), (2.0, joined(2)), (2.1, boundary(1, 2)))
    assert history.tokens == 10


def test_the_same_sequence_of_a_new_incarnation_is_another_step() -> None:
    again = actions.Send(
        connection=2, message=messages.Welcome(run="r", incarnation=4, index=0, tokens=0, budget_tokens=1)
    )
    history = tape_of(
        (0.0, joined()), (1.0, boundary(1)), (2.0, joined(2, None)), (2.0, again), (4.0, boundary(1, 2))
    )
    assert history.tokens == 20


def test_a_burst_of_held_up_reports_is_laid_out_backwards() -> None:
    history = tape_of((0.0, joined()), *((9.0, boundary(i)) for i in (1, 2, 3)))
    assert [(s.start_s, s.end_s) for s in history.steps["a"]] == [(6, 7), (7, 8), (8, 9)]


def test_steps_of_one_incarnation_never_overlap(decoupled: Folder) -> None:
    for steps in decoupled.history.steps.values():
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(steps))


def test_a_wait_is_not_a_step() -> None:
    history = tape_of((0.0, joined()), (1.0, boundary(1)), (4.0, boundary(2, step_s=0.0, wait_s=3.0)))
    assert len(history.steps["a"]) == 1
    assert history.waits["a"] == [(1.0, 4.0)]


def test_a_wait_that_is_reported_while_it_lasts_and_after_the_next_step_counts_once() -> None:
    idle, after = boundary(2, step_s=0.0, wait_s=2.8), boundary(3, wait_s=3.0)
    history = tape_of((0.0, joined()), (1.0, boundary(1)), (3.9, idle), (5.0, after))
    assert [(s.start_s, s.end_s) for s in history.steps["a"]] == [(0.0, 1.0), (4.0, 5.0)]
    assert union(history.waits["a"]) == [(1.0, 4.0)]


def test_reports_on_a_connection_that_was_hung_up_do_not_count() -> None:
    history = tape_of((0.0, joined()), (0.5, actions.HangUp(connection=1)), (1.0, boundary(1)))
    assert history.tokens == 0


def test_fragment_sizes_come_from_the_layout() -> None:
    layout = '{"fragments":[{"pieces":[{"length":5}],"buffers":[{"length":1}],"counters":[{"length":2}]}]}'
    laid_out = Layout(params=20, buffers=4, counters=16)
    assert fragment_bytes(layout) == [FragmentBytes(dense=20, value=laid_out.size_bytes)]
    assert fragment_bytes("not a layout") == []
