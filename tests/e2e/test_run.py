"""Real processes, sockets, files and text: the runs that the README promises, at the smallest scale."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from farflung import tape
from farflung.train.gpt import GPT, scale_config

RECIPE = """
scale = "micro"
num_learners = 3
steps = {steps}
pace_s = {pace_s}
evals = 1
restart_s = 0.2
eval_batches = 4

[policy]
num_fragments = 4
sync_every_steps = 8
lease_s = 2.0
{more}
"""


def start(folder: Path, *args: str) -> "subprocess.Popen[str]":
    """`farflung run` in a session of its own, so that a signal reaches only what a terminal would reach."""
    return subprocess.Popen(
        [sys.executable, "-m", "farflung.cli", "run", *args],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: "subprocess.Popen[str]", timeout_s: float = 120) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def processes_of(run_dir: Path) -> list[str]:
    """Command lines of processes that work for this run (sidecars are found through their trainers)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(run_dir) in command and "farflung.runtime" in command:
            found.append(command)
    return found


def notes(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [
        r.data["data"]
        for r in tape.read_run(run_dir)
        if r.node == "syncer" and r.type == "Note" and r.data["kind"] == kind
    ]


def wait_for(run_dir: Path, process: "subprocess.Popen[str]", *texts: str) -> None:
    """Until the syncer's tape holds every text; the process must live meanwhile."""
    path = run_dir / tape.TAPE_DIR / "syncer.jsonl"
    while process.poll() is None:
        if path.exists() and all(text in path.read_text() for text in texts):
            return
        time.sleep(0.05)
    raise AssertionError(f"{texts} never happened: {process.communicate()}")


def test_a_killed_learner_returns_and_is_proven_right(tmp_path: Path) -> None:
    kill = '[[faults]]\nkind = "kill"\ntarget = "learner-1"\nat_progress = 0.3\n'
    (tmp_path / "r.toml").write_text(RECIPE.format(steps=260, pace_s=0.03, more=kill))
    code, out, err = finish(start(tmp_path, "r.toml", "--out", "runs/one", "--json"))
    assert code == 0, err
    summary = json.loads(out)
    run_dir = tmp_path / "runs/one"
    assert json.loads((run_dir / tape.SUMMARY).read_text()) == summary
    assert summary["kills"] == 1
    assert summary["rejoins"] == 1, err
    assert summary["ledger_exact"]
    fates = summary["token_fragments"]
    assert fates["in_flight"] == 0
    assert fates["trained"] == 4 * summary["tokens_trained"]
    assert fates["trained"] == fates["merged"] + sum(fates["discarded"].values())
    assert summary["eval_loss_final"] < summary["eval_loss_start"] - 1
    proof = [n for n in notes(run_dir, "rejoin_proved") if n["role"] == "rejoin"]
    assert [p["learner"] for p in proof] == ["learner-1"]
    assert all(value for key, value in proof[0].items() if key.endswith("_equal"))
    assert proof[0]["state"] == "warm"
    assert processes_of(run_dir) == []
    assert (run_dir / tape.REPORT).stat().st_size > 10_000
    model = GPT(scale_config("micro"))
    model.load_state_dict(safetensors.torch.load_file(run_dir / tape.MODEL), strict=False)


def test_ctrl_c_stops_in_order_and_resume_goes_on(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(RECIPE.format(steps=200, pace_s=0.03, more=""))
    run_dir = tmp_path / "runs/two"
    process = start(tmp_path, "r.toml", "--out", "runs/two", "--json")
    merged = [f'"kind":"merged","data":{{"fragment":{p},"version":2,' for p in range(4)]
    joined = [f'"kind":"joined","data":{{"learner":"learner-{i}"' for i in range(3)]
    wait_for(run_dir, process, *merged, *joined)
    os.kill(process.pid, signal.SIGINT)
    code, out, err = finish(process)
    assert code == 0, err
    before = json.loads(out)
    assert before["outcome"] == "suspended"
    assert before["ledger_exact"]
    assert processes_of(run_dir) == []
    assert sorted(p.name for p in (run_dir / tape.CHECKPOINTS).iterdir()) == [
        "learner-0.safetensors",
        "learner-1.safetensors",
        "learner-2.safetensors",
        "syncer.safetensors",
    ]
    code, out, err = finish(start(tmp_path, "--resume", "runs/two", "--json"))
    assert code == 0, err
    after = json.loads(out)
    assert after["outcome"] == "finished"
    assert after["ledger_exact"]
    assert after["tokens_trained"] >= 3 * 200 * 16 * 64
    assert after["rejoins"] == 0  # everybody went on where it was
    last = {n["learner"]: n["role"] for n in notes(run_dir, "joined")}
    assert last == dict.fromkeys(["learner-0", "learner-1", "learner-2"], "reattach")
    assert after["eval_loss_final"] < before["eval_loss_final"]


@pytest.mark.parametrize("moment", ["config.json", "logs/learner-2.log"])
def test_ctrl_c_before_the_first_step_leaves_nothing_behind(tmp_path: Path, moment: str) -> None:
    (tmp_path / "r.toml").write_text(RECIPE.format(steps=50, pace_s=0.0, more=""))
    run_dir = tmp_path / "runs/three"
    process = start(tmp_path, "r.toml", "--out", "runs/three")
    while not (run_dir / moment).exists() and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    code, _, err = finish(process)
    assert code in (0, 130), err
    assert "Traceback" not in err
    assert processes_of(run_dir) == []


def test_a_crashed_sidecar_does_not_touch_training(tmp_path: Path) -> None:
    kill = '[[faults]]\nkind = "kill"\ntarget = "learner-1"\nat_progress = 0.3\nwhat = "sidecar"\n'
    (tmp_path / "r.toml").write_text(RECIPE.format(steps=120, pace_s=0.03, more=kill))
    code, out, err = finish(start(tmp_path, "r.toml", "--out", "runs/four", "--json"))
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["rejoins"], summary["ledger_exact"]) == (0, True)
    roles = [n["role"] for n in notes(tmp_path / "runs/four", "joined") if n["learner"] == "learner-1"]
    assert roles[1:] == ["reattach"]
    steps = [
        r.data["message"]["step"]
        for r in tape.read_run(tmp_path / "runs/four")
        if r.type == "Say" and r.node.startswith("learner-1") and r.data["message"]["type"] == "Boundary"
    ]
    assert sorted(set(steps)) == list(range(1, max(steps) + 1))  # no step was lost on the way
