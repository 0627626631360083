"""Real runs of methods with own state: a killed learner goes on with what it kept, a stopped run with all."""

import json
import os
import signal
from pathlib import Path

import pytest
from test_run import finish, notes, processes_of, start, wait_for

from farflung.testing.tapes import replay_run

RECIPE = """
method = "{method}"
scale = "micro"
num_learners = 4
steps = 600
pace_s = 0.05
evals = 1
eval_batches = 4
restart_s = 0.2

[policy]
sync_every_steps = 12
codec = "{codec}"
lease_s = 8.0

[[faults]]
kind = "kill"
target = "learner-1"
at_progress = 0.08
"""
METHODS = {"sparseloco": "top512-2bit-12bit", "dct_momentum": "dct-top128-int8-12bit"}
LEARNERS = [f"learner-{i}" for i in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_killed_learner_goes_on_with_its_own_state_and_a_stopped_run_with_all(
    tmp_path: Path, method: str
) -> None:
    (tmp_path / "r.toml").write_text(RECIPE.format(method=method, codec=METHODS[method]))
    run_dir = tmp_path / "run"
    process = start(tmp_path, "r.toml", "--out", "run", "--json")
    wait_for(run_dir, process, '"kind":"rejoined"')
    os.kill(process.pid, signal.SIGINT)
    code, out, err = finish(process)
    assert (code, json.loads(out)["outcome"]) == (0, "suspended"), err
    assert processes_of(run_dir) == []
    code, out, err = finish(start(tmp_path, "--resume", "run", "--json"), timeout_s=300)
    assert code == 0, err
    summary = json.loads(out)
    assert summary["outcome"] == "finished" and summary["ledger_exact"] and not summary["alarms"]
    counts = ("kills", "rejoins", "rejoins_own_state", "rejoins_zero_state")
    assert [summary[name] for name in counts] == [1, 1, 1, 0]

    (own,) = notes(run_dir, "own_state")
    assert (own["learner"], own["taken"]) == ("learner-1", "own") and own["age_steps"] <= 12
    (proof,) = [n for n in notes(run_dir, "rejoin_proved") if n["role"] == "rejoin"]
    assert proof["own_equal"] and all(proof[f"{what}_equal"] for what in ("params", "inner", "lr", "cursor"))
    resumed = notes(run_dir, "resume_proved")
    assert sorted(n["learner"] for n in resumed) == LEARNERS and all(n["state_equal"] for n in resumed)
    assert all(verdict.same for verdict in replay_run(run_dir))
    assert summary["eval_loss_final"] < summary["eval_loss_start"] - 1
