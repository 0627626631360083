"""Headline figures: those that only some tasks measure are shown where they are."""

from farflung.report.rows import rows_for

PLAIN = {"eval_loss_start": 5.5, "eval_loss_final": 2.0}
WITH = {**PLAIN, "eval_accuracy_start": 0.1, "eval_accuracy_final": 0.875}


def shown(*summaries):
    return [[row.value(s) for s in summaries] for row, name, _ in rows_for(summaries) if name == "accuracy"]


def test_accuracy_is_shown_only_for_runs_that_measured_it():
    assert shown(PLAIN) == []
    assert shown(WITH) == [["10.0 % → 87.5 %"]]
    assert shown(PLAIN, WITH) == [["–", "10.0 % → 87.5 %"]]
