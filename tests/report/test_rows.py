"""Headline figures: those that only some tasks measure are shown where they are."""

import pytest

from farflung.report.rows import rows_for

PLAIN = {"eval_loss_start": 5.5, "eval_loss_final": 2.0}
WITH = {**PLAIN, "eval_accuracy_start": 0.1, "eval_accuracy_final": 0.875}


def shown(*summaries, called="accuracy"):
    return [[row.value(s) for s in summaries] for row, name, _ in rows_for(summaries) if name == called]


def test_accuracy_is_shown_only_for_runs_that_measured_it():
    assert shown(PLAIN) == []
    assert shown(WITH) == [["10.0 % → 87.5 %"]]
    assert shown(PLAIN, WITH) == [["–", "10.0 % → 87.5 %"]]


def test_an_accuracy_of_zero_is_a_figure():
    assert shown({**WITH, "eval_accuracy_final": 0.0}) == [["10.0 % → 0.0 %"]]


def test_clipped_contributions_are_shown_only_where_there_were_some():
    assert shown({"clipped": 0}, called="clipped") == shown(PLAIN, called="clipped") == []
    assert shown({"clipped": 0}, {"clipped": 1234}, called="clipped") == [["–", "1,234"]]


@pytest.mark.parametrize(
    ("kills", "rejoins", "text"), [(0, 0, "0 / 0"), (0, 2, "– / 2"), (2, 2, "2 / 2"), (1, 0, "1 / 0")]
)
def test_rejoins_without_planned_kills_do_not_claim_that_nobody_died(kills, rejoins, text):
    assert shown({"kills": kills, "rejoins": rejoins}, called="killed / rejoined") == [[text]]
