"""A finished run beside its prediction. The runs here are the lab's: their past is read as a real run's is."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from farflung import tape
from farflung.config import write_config
from farflung.errors import UserError
from farflung.lab.start import lab_config, run_lab
from farflung.plan.check import Figure, as_json, check
from farflung.plan.past import _not_predicted, read_past, trains_its_task
from farflung.plan.show import check_table
from farflung.recipe import make_recipe
from farflung.report.closing import close_run
from farflung.report.history import Note

THIN = [
    {"kind": "throttle", "target": f"learner-{i}", "mbps": 1.0, "at_s": 0.0, "for_s": 900.0} for i in range(3)
]
KILL = {"kind": "kill", "target": "learner-1", "at_progress": 0.3}


def recipe(method: str, **policy: Any) -> dict[str, Any]:
    return {
        "method": method, "policy": {"lease_s": 4.0, **policy}, "scale": "micro", "num_learners": 3, "steps": 90,
        "batch_size": 1, "evals": 0, "eval_batches": 1, "faults": [*THIN, KILL], "restart_s": 1.0,
        "lab": {"step_s": [0.15, 0.15, 0.18], "latency_s": 0.001, "merge_s": 0.002, "workers": 0, "jitter": 0.02},
    }  # fmt: skip


def lab(folder: Path, raw: dict[str, Any]) -> Path:
    config = lab_config(make_recipe(raw))
    folder.mkdir()
    write_config(config, folder)
    close_run(folder, run_lab(config, folder))
    return folder


@pytest.mark.parametrize(
    ("method", "policy"),
    [
        ("decoupled", {"num_fragments": 6, "sync_every_steps": 24}),
        ("diloco", {"sync_every_steps": 15}),
        ("gasloc", {"sync_every_steps": 10}),
    ],
)
def test_a_run_is_as_predicted(method: str, policy: dict[str, Any], tmp_path: Path) -> None:
    figures = check(lab(tmp_path / "run", recipe(method, **policy)))
    assert {"bytes_up", "bytes_down", "goodput", "round_interval_s", "duration_s"} <= {
        f.name for f in figures
    }
    wrong = [f for f in figures if f.holds is False]
    assert not wrong, wrong


def test_the_past_holds_what_befell_the_run(tmp_path: Path) -> None:
    past = read_past(lab(tmp_path / "run", recipe("diloco", sync_every_steps=15)))
    assert past.paces["learner-2"].step_s == pytest.approx(0.18, rel=0.02)
    assert past.paces["learner-0"].spread == pytest.approx(0.02, rel=0.4)
    assert [f.kind for f in past.faults] == ["throttle"] * 3 + ["kill"]
    assert past.faults[0].at_s == pytest.approx(0.0, abs=0.01) and past.faults[3].at_s > 1
    assert past.away_s == {"learner-1": [pytest.approx(3.0, abs=0.1)]}  # restart_s and the lab's startup_s


def test_the_same_run_is_predicted_the_same(tmp_path: Path) -> None:
    run_dir = lab(tmp_path / "run", recipe("diloco", sync_every_steps=30))
    assert as_json(run_dir, check(run_dir)) == as_json(run_dir, check(run_dir))
    found = json.loads(as_json(run_dir, check(run_dir)))["figures"]
    assert found["bytes_up"]["within"] == 0.03 and found["merges"]["holds"] is None


def test_a_figure_holds_or_not() -> None:
    near = Figure(name="goodput", predicted=0.95, measured=1.0, unit="share", within=0.1)
    assert near.holds and near.off == pytest.approx(-0.05)
    assert not Figure(name="goodput", predicted=0.8, measured=1.0, unit="share", within=0.1).holds
    assert Figure(name="merges", predicted=1, measured=0, unit="", within=None).off is None


def test_what_is_no_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        read_past(tmp_path)
    run_dir = lab(tmp_path / "run", recipe("diloco"))
    summary = json.loads((run_dir / "summary.json").read_text())
    (run_dir / "summary.json").write_text(json.dumps({**summary, "outcome": "suspended"}))
    with pytest.raises(UserError, match="did not finish"):
        read_past(run_dir)


def test_a_run_of_a_model_of_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = lab(tmp_path / "run", recipe("diloco"))
    other = lab_config(make_recipe({**recipe("diloco"), "scale": "tiny"}))
    assert not trains_its_task(other, list(tape.read_run(run_dir)))
    monkeypatch.setattr("farflung.plan.past.trains_its_task", lambda *_: False)
    with pytest.raises(UserError, match="brought a model of their own: only runs of a recipe's task"):
        read_past(run_dir)


def test_what_is_off_is_marked_without_colour() -> None:
    bad = Figure(name="goodput", predicted=0.8, measured=1.0, unit="share", within=0.1)
    good = Figure(name="goodput", predicted=0.95, measured=1.0, unit="share", within=0.1)
    assert list(check_table("run", [bad, good]).columns[4].cells) == ["off: within 10%", "within 10%"]


def test_learners_that_left_or_died_unplanned_are_said() -> None:
    notes = [
        Note(2.0, "lost", {"learner": "a"}), Note(9.0, "lost", {"learner": "a"}),
        Note(21.5, "left", {"learner": "c"}),
        Note(30.0, "ending", {}), Note(31.0, "left", {"learner": "b"}),
    ]  # fmt: skip
    history: Any = SimpleNamespace(
        of_kind=lambda kind: [n for n in notes if n.kind == kind], end_s=40.0,
        faults=[{"fault": "kill", "target": "a", "t": 1.0}],
    )  # fmt: skip
    assert list(_not_predicted(history)) == [
        "a was lost at 9.0 s: not part of the prediction",
        "c left at 21.5 s: not part of the prediction",
    ]
    assert json.loads(as_json(Path("run"), [], ["x"]))["not_predicted"] == ["x"]


def test_a_planned_kill_is_part_of_the_prediction(tmp_path: Path) -> None:
    assert read_past(lab(tmp_path / "run", recipe("diloco", sync_every_steps=15))).not_predicted == []
