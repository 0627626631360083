"""`farflung chaos`: a recipe with its plan in the lab and as real processes, then the verdict."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from farflung import cli, tape
from farflung.testing.tapes import replay_run

RECIPE = """
scale = "micro"
num_learners = {num_learners}
steps = {steps}
evals = 0
eval_batches = 1
restart_s = 0.2
pace_s = {pace_s}

[policy]
num_fragments = 2
sync_every_steps = 8
lease_s = 2.0

[lab]
workers = 0
"""


def entry(kind: str, target: str, at_progress: float, **fields: object) -> str:
    values = {"kind": kind, "target": target, "at_progress": at_progress, **fields}
    return "\n[[faults]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def chaos(folder: Path, *args: str) -> tuple[int, dict[str, Any], str]:
    """The verb in this process: exit code, what --json said, and the lines for people."""
    out, err = io.StringIO(), io.StringIO()
    argv, threads, path = sys.argv, torch.get_num_threads(), list(sys.path)
    sys.argv = ["farflung", "chaos", *args, "--json"]
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as exit:
        code = int(exit.code or 0)
    finally:
        sys.argv, sys.path = argv, path
        torch.set_num_threads(threads)
    return code, json.loads(out.getvalue() or "{}"), err.getvalue()


def records(run_dir: Path, node: str) -> list[tape.Record]:
    return [r for r in tape.read_run(run_dir) if r.node == node]


def faults(run_dir: Path) -> list[str]:
    metrics = [json.loads(line) for line in (run_dir / tape.METRICS).read_text().splitlines()]
    return [m["fault"] for m in metrics if m["kind"] == "fault"]


@pytest.fixture(scope="module")
def in_lab(tmp_path_factory) -> Path:
    """A run in virtual time that loses its syncer, fills disks, moves clocks and draws partitions."""
    folder = tmp_path_factory.mktemp("lab")
    plan = [
        entry("clock_jump", "syncer", 0.2, jump_s=30.0),
        entry("disk_full", "learner-1", 0.3, for_s=1.0),
        entry("disk_full", "syncer", 0.35, for_s=0.4),
        entry("syncer_loss", "syncer", 0.5, for_s=0.5),
        '\n[[generate]]\ngenerator = "partitions"\nper_learner = 1.0\nfor_s = [0.3, 0.5]\n',
    ]
    (folder / "r.toml").write_text(RECIPE.format(num_learners=2, steps=40, pace_s=0) + "".join(plan))
    code, said, err = chaos(folder, "r.toml", "--lab", "--out", "out")
    assert (code, said["verdict"]["ok"], said["summary"]["ledger_exact"]) == (0, True, True), err
    assert said["summary"]["failed_writes"] > 0
    return folder / "out"


def test_a_lab_run_with_every_machine_of_it_in_trouble_replays(in_lab):
    assert {"clock_jump", "disk_full", "syncer_loss", "partition"} == set(faults(in_lab))
    verdicts = replay_run(in_lab)
    assert {v.segment for v in verdicts} >= {"syncer.jsonl", "syncer.2.jsonl", "learner-1.jsonl"}
    assert all(v.same and not v.truncated for v in verdicts), "\n".join(map(str, verdicts))


def test_a_folder_is_judged_again_and_a_broken_promise_is_exit_code_1(in_lab, tmp_path):
    lines = (in_lab / tape.TAPE).read_text().splitlines()
    merge = next(i for i, line in enumerate(lines) if '"type":"Merge"' in line)
    (tmp_path / tape.TAPE_DIR).mkdir()
    for name in (tape.METRICS, tape.CONFIG):
        (tmp_path / name).write_bytes((in_lab / name).read_bytes())
    (tmp_path / tape.TAPE).write_text(
        "\n".join([*lines[: merge + 1], lines[merge], *lines[merge + 1 :]]) + "\n"
    )
    assert chaos(tmp_path, str(in_lab))[0] == 0
    code, said, _ = chaos(tmp_path, ".")
    assert code == 1
    assert "no contribution is merged twice" in {f["invariant"] for f in said["verdict"]["findings"]}


def test_a_tape_without_a_syncers_records_is_nothing_to_judge(in_lab, tmp_path):
    (tmp_path / "run" / tape.TAPE_DIR).mkdir(parents=True)
    syncer, learner = (in_lab / tape.TAPE_DIR / f"{node}.jsonl" for node in ("syncer", "learner-0"))
    (tmp_path / "run" / tape.TAPE_DIR / learner.name).write_bytes(learner.read_bytes())
    (tmp_path / "run" / tape.TAPE_DIR / syncer.name).write_text(syncer.read_text().splitlines()[0] + "\n")
    code, said, err = chaos(tmp_path, "run")
    assert (code, said, len(err.splitlines())) == (2, {}, 1)
    assert "run: nothing to judge: its tape holds no records of a syncer" in err


@pytest.mark.parametrize("args", [["--lab"], ["--set", "seed=1"], ["--out", "out"]])
def test_what_has_no_effect_on_a_folder_that_is_only_judged_is_refused(in_lab, tmp_path, args):
    code, said, err = chaos(tmp_path, str(in_lab), *args)
    assert (code, said, len(err.splitlines())) == (2, {}, 1)
    assert "a run folder is only judged: give no --lab, --set or --out with it" in err


def test_what_only_the_lab_can_do_is_refused_before_anything_starts(tmp_path):
    plan = entry("kill", "learner-0", 0.1) + entry("syncer_loss", "syncer", 0.5, for_s=0.5)
    (tmp_path / "r.toml").write_text(RECIPE.format(num_learners=2, steps=40, pace_s=0) + plan)
    code, _, err = chaos(tmp_path, "r.toml", "--out", "out")
    assert code == 2 and err.startswith("farflung: fault 2: syncer_loss") and len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_real_run_in_bad_weather_keeps_every_promise_and_replays(tmp_path):
    plan = [
        entry("throttle", "learner-0", 0.05, for_s=1.5, mbps=20.0),
        entry("duplicate", "learner-1", 0.1, count=2),
        entry("corrupt", "learner-1", 0.25, count=2),
        entry("disconnect", "learner-1", 0.4),
        entry("delay", "learner-0", 0.45, for_s=0.5, latency_s=0.1),
        entry("partition", "learner-0", 0.55, for_s=1.0, direction="up"),
        entry("corrupt", "learner-1", 0.65, what="frame"),
    ]
    (tmp_path / "r.toml").write_text(RECIPE.format(num_learners=2, steps=130, pace_s=0.04) + "".join(plan))
    done = subprocess.run(
        [sys.executable, "-m", "farflung.cli", "chaos", "r.toml", "--out", "out", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    said, run_dir = json.loads(done.stdout), tmp_path / "out"
    assert said["summary"]["ledger_exact"] and said["verdict"]["ended"] == "finished"
    assert sorted(faults(run_dir)) == sorted(line.split('"')[1] for line in plan)
    refused = [
        r.data["data"] for r in records(run_dir, "syncer") if r.type == "Note" and r.data["kind"] == "refused"
    ]
    assert [n for n in refused if n["reason"] == "repeat" and n["learner"] == "learner-1"]
    assert [n for n in refused if n["reason"] == "frame" and "checksum" in n["detail"]]
    assert [n for n in refused if n["reason"] == "frame" and "control frame" in n["detail"]]
    links = [r.type for r in records(run_dir, "learner-1") if r.type in ("LinkUp", "LinkDown")]
    assert links[:5] == ["LinkUp", "LinkDown", "LinkUp", "LinkDown", "LinkUp"]
    verdicts = replay_run(run_dir)
    assert len(verdicts) == 3 and all(v.same for v in verdicts), "\n".join(map(str, verdicts))
