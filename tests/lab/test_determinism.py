"""A lab's run is a function of its recipe: the same tape and the same bits, on any number of workers."""

import json

import pytest
from lab_helpers import SMALL, run, small
from typer.testing import CliRunner

from farflung import tape
from farflung.cli import app
from farflung.testing.tapes import replay_run


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("lab") / "once"
    return run_dir, run(small(), run_dir)


def test_the_same_seed_gives_the_same_tape_and_the_same_bits(once, tmp_path):
    first_dir, first = once
    again = run(small(), tmp_path / "again")
    assert (tmp_path / "again" / tape.TAPE).read_bytes() == (first_dir / tape.TAPE).read_bytes()
    assert again["digest"] == first["digest"]
    assert (first["kills"], first["rejoins"], first["ledger_exact"]) == (1, 1, True)


def test_another_seed_gives_another_tape_and_other_bits(once, tmp_path):
    first_dir, first = once
    other = run(small(seed=1), tmp_path / "other")
    assert (tmp_path / "other" / tape.TAPE).read_bytes() != (first_dir / tape.TAPE).read_bytes()
    assert other["digest"] != first["digest"]


def test_workers_change_nothing(once, tmp_path):
    first_dir, first = once
    shared = run(small(lab={**SMALL["lab"], "workers": 2}), tmp_path / "shared")
    assert (tmp_path / "shared" / tape.TAPE).read_bytes() == (first_dir / tape.TAPE).read_bytes()
    assert shared["digest"] == first["digest"]


def test_a_lab_tape_holds_no_path_and_no_date(once):
    run_dir, _ = once
    text = (run_dir / tape.TAPE).read_text()
    assert str(run_dir.parent) not in text
    header = json.loads(text.splitlines()[-1])["node"], json.loads(text.splitlines()[0])["data"]["run"]
    assert header[1] in ("lab-0", None)


def test_the_tape_replays_to_the_same_actions(once):
    run_dir, _ = once
    verdicts = replay_run(run_dir)
    assert len(verdicts) == 5  # the syncer, three learners, one of them twice
    assert all(v.same for v in verdicts), "\n".join(map(str, verdicts))


def test_the_command_line_runs_it_and_repeats_its_order(tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'scale = "micro"\nnum_learners = 2\nsteps = 6\nbatch_size = 2\nevals = 0\neval_batches = 1\n'
    )
    settings = [
        "--set",
        "policy.num_fragments=2",
        "--set",
        "policy.sync_every_steps=4",
        "--set",
        "lab.workers=0",
    ]
    out = str(tmp_path / "out")
    result = CliRunner().invoke(app, ["lab", str(recipe), "--out", out, "--json", *settings])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    result = CliRunner().invoke(app, ["lab", "--order", out, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["digest"] == summary["digest"]
    assert CliRunner().invoke(app, ["replay", out]).exit_code == 0
