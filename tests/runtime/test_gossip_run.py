"""`farflung run` without a hub between the learners: the short run, and one that much happens to."""

import json
import signal
import time
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
from processes_helpers import Served, end, finish, start

from farflung import tape
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.testing.tapes import replay_run
from farflung.train.gpt import GPT, SCALES

RECIPE = """
method = "gasloc"
scale = "micro"
num_learners = {learners}
steps = {steps}
pace_s = {pace_s}
warmup_steps = 5
restart_s = 0.2
evals = 1
eval_batches = 2

[policy]
sync_every_steps = 6
lease_s = 2.0
gathers = 2
"""
FAULTS = """
[[faults]]
kind = "throttle"
target = "learner-3"
mbps = 4.0
at_progress = 0.02
for_s = 10.0

[[faults]]
kind = "kill"
target = "learner-1"
at_progress = 0.05

[[faults]]
kind = "kill"
target = "learner-2"
what = "sidecar"
at_progress = 0.1
"""


class Run:
    """A run folder that a test looks into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = list(tape.read_run(folder))
        metrics = folder / tape.METRICS  # of a supervised run
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        self.evals = [r for r in map(json.loads, lines) if r["kind"] == "eval"]
        self.summary = json.loads((folder / tape.SUMMARY).read_bytes())

    def notes(self, kind: str) -> list[dict]:
        found = [r for r in self.records if r.node.startswith("syncer") and r.type == "Note"]
        return [r.data["data"] for r in found if r.data["kind"] == kind]

    def overdue_s(self) -> tuple[int, float]:
        """How many meetings were waited for, and how far beyond its deadline the worst wait ended."""
        due: dict[str, float | None] = {}
        waits, worst = 0, float("-inf")
        for record in self.records:
            if record.type == "SetTimer" and record.data["name"] == "meet":
                due[record.node] = record.data["at_s"]
            mixes = record.type == "Post" and record.data["command"]["type"] == "Mix"
            deadline_s = due.get(record.node)
            if mixes and deadline_s is not None:
                waits, worst = waits + 1, max(worst, record.t - deadline_s)
        return waits, worst


def recipe(folder: Path, faults: str = "", **values) -> Path:
    path = folder / "r.toml"
    path.write_text(RECIPE.format(**{"learners": 3, "steps": 30, "pace_s": 0.02, **values}) + faults)
    return path


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gossip")
    recipe(folder)
    process = start(folder, "-m", "farflung.cli", "run", "r.toml", "--out", "run", "--json")
    code, out, err = finish(process)
    assert code == 0, err
    json.loads(out)
    return Run(folder / "run")


def test_a_run_ends_in_order_and_all_its_work_is_accounted_for(short):
    summary = short.summary
    assert summary["outcome"] == "finished" and summary["ledger_exact"] and summary["merged_share"] == 1.0
    assert summary["bytes_up"] > 0 and short.notes("half_exchange") == [] and not short.summary["alarms"]
    assert all((short.folder / tape.LOGS / f"{n}.log").read_text() == "" for n in ("learner-0", "syncer"))


def test_consensus_averages_are_evaluated_as_they_come_and_learners_at_the_end(short):
    *during, last = short.evals
    numbers = [e["versions"] for e in during]
    assert (
        numbers[0] == [] and len(numbers) > 1 and numbers == sorted(numbers)
    )  # the newest at the time counts
    assert sorted(last["workers"]) == ["learner-0", "learner-1", "learner-2"]
    assert all(abs(loss - last["loss"]) < 0.5 for loss in last["workers"].values())
    assert last["loss"] < during[0]["loss"] and not (short.folder / "workers").exists()


def test_every_machine_replays_and_no_wait_outlived_its_deadline(short):
    assert all(verdict.same for verdict in replay_run(short.folder))
    waits, overdue_s = short.overdue_s()
    assert waits > 3 and overdue_s < 1.0  # as late as a busy machine may ring, of a deadline of seconds


def test_the_model_loads_strictly_with_plain_pytorch(short):
    GPT(SCALES["micro"]).load_state_dict(safetensors.torch.load_file(short.folder / tape.MODEL))


def test_vectors_went_straight_from_learner_to_learner(short):
    kinds = {record.type for record in short.records}
    assert {"Knocked", "Admit", "Offer", "Arrived"} <= kinds and not {"Relay", "FetchRelay"} & kinds
    assert msgspec.convert({"type": "Offer", **_first(short, "Offer")}, act.Offer).address.startswith(
        "http://127."
    )
    assert msgspec.convert({"type": "Arrived", **_first(short, "Arrived")}, ev.Arrived).num_bytes > 0


def _first(run: Run, kind: str) -> dict:
    return next(record.data for record in run.records if record.type == kind)


@pytest.mark.slow
def test_a_run_that_much_happens_to_is_stopped_resumed_and_ends_in_order(tmp_path):
    """A thin line, a death, a crashed sidecar; then Ctrl-C, and --resume."""
    recipe(tmp_path, FAULTS, learners=4, steps=400, pace_s=0.1)
    process = start(tmp_path, "-m", "farflung.cli", "run", "r.toml", "--out", "run")
    try:
        tape_path = tmp_path / "run" / tape.TAPE_DIR / "syncer.jsonl"
        _wait(process, lambda: tape_path.exists() and '"rejoined"' in tape_path.read_text())
        time.sleep(2.0)
        process.send_signal(signal.SIGINT)
        code, out, err = finish(process)
        assert code == 0 and "--resume" in out, err
        process = start(tmp_path, "-m", "farflung.cli", "run", "--resume", "run")
        code, _, err = finish(process)
        assert code == 0, err
    finally:
        end(process)
    run = Run(tmp_path / "run")
    assert run.summary["outcome"] == "finished" and run.summary["ledger_exact"]
    (proved,) = [n for n in run.notes("rejoin_proved") if n["role"] == "rejoin"]
    assert proved["state"] == "warm" and all(
        proved[f"{w}_equal"] for w in ("params", "inner", "lr", "cursor")
    )
    epochs = [note["number"] for note in run.notes("epoch")]
    assert epochs == sorted(set(epochs)) and len(epochs) >= 4
    assert all(verdict.same for verdict in replay_run(run.folder))
    waits, overdue_s = run.overdue_s()
    assert waits > 20 and overdue_s < 0.2
    assert len(run.evals[-1]["workers"]) == 4 and run.evals[-1]["loss"] < 3.5


def _wait(process, happened) -> None:
    deadline_s = time.monotonic() + 90
    while process.poll() is None and time.monotonic() < deadline_s:
        if happened():
            return
        time.sleep(0.1)
    raise AssertionError(process.communicate())


@pytest.mark.slow
def test_learners_on_other_machines_say_where_they_may_be_dialled(tmp_path):
    recipe(tmp_path, learners=2)
    with Served(tmp_path, "r.toml") as served:
        line = ("-m", "farflung.cli", *served.line.split()[1:])
        learners = [
            served.learner(*line, "--name", "ada", "--listen", "127.0.0.1:0"),
            served.learner(*line, "--name", "bob", "--listen", "off"),
        ]
        assert [finish(learner) for learner in learners] == [(0, "finished\n", "")] * 2
        code, out, err = finish(served.process)
        assert (code, err) == (0, "") and out.startswith("finished: run/model.safetensors")
    run = Run(tmp_path / "run")
    (epoch, *_) = [
        r.data["message"] for r in run.records if r.type == "Send" and r.data["message"]["type"] == "Epoch"
    ]
    addresses = {peer["name"]: peer["address"] for peer in epoch["members"]}
    assert addresses["ada"].startswith("http://127.0.0.1:") and addresses["bob"] is None
    relays = [r for r in run.records if r.type == "MessageArrived" and r.data["message"]["type"] == "Relay"]
    assert relays and run.notes("half_exchange") == [] and not (run.folder / "workers").exists()
