"""Figures of a run with a kill, a freeze and a rejoin, against hand-made expectations."""

from dataclasses import replace

import pytest
from fake_run import END_S

from farflung.report.figures import figures, largest_merge_gap, narrow, quorum
from farflung.report.folder import Folder


def test_goodput_leaves_out_downtime_and_freezes(decoupled: Folder) -> None:
    numbers = figures(decoupled.history)
    lost_s = 5.9 + 5.0 + 4 * 1.0 + 3.0  # kill to first step, freeze, tail of the run, rounding of the start
    whole_s = 4 * numbers.duration_s
    assert numbers.goodput == pytest.approx(1 - lost_s / whole_s, abs=0.02)


def test_uptime_needs_a_quorum_only(decoupled: Folder, diloco: Folder) -> None:
    assert quorum(decoupled.history) == 2
    assert figures(decoupled.history).uptime > 0.97
    assert quorum(diloco.history) == 4
    assert figures(diloco.history).uptime < 0.85


def test_the_largest_gap_between_merges_shows_the_barrier(decoupled: Folder, diloco: Folder) -> None:
    assert figures(decoupled.history).largest_merge_gap_s < 2
    assert figures(diloco.history).largest_merge_gap_s > 10


def test_a_tail_without_merges_is_a_gap(decoupled: Folder) -> None:
    history = replace(decoupled.history, merges=[m for m in decoupled.history.merges if m.t < 30])
    gap = largest_merge_gap(history)
    assert gap is not None
    assert gap[1] == pytest.approx(END_S - 1, abs=0.6)


def test_final_merges_are_no_part_of_the_rhythm(decoupled: Folder) -> None:
    assert sum(m.final for m in decoupled.history.merges) == 4
    assert figures(decoupled.history).median_merge_gap_s == pytest.approx(1.0, abs=0.05)


def test_a_merge_of_one_among_several_live_is_narrow(decoupled: Folder) -> None:
    merge = replace(decoupled.history.merges[0], breadth=1, live=4)
    alone = replace(merge, live=1)
    assert narrow([merge, alone]) == 1


def test_counts_name_their_reasons(decoupled: Folder, diloco: Folder) -> None:
    numbers = figures(decoupled.history)
    assert (numbers.kills, numbers.rejoins) == (1, 1)
    assert numbers.refused == {"fingerprint": 1}
    assert figures(diloco.history).waits == {"learner-1 owes a contribution": 1}


def test_fractions_are_between_zero_and_one(decoupled: Folder, diloco: Folder) -> None:
    for folder in (decoupled, diloco):
        numbers = figures(folder.history)
        assert 0 < numbers.goodput <= 1
        assert 0 < numbers.uptime <= 1
