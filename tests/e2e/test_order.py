"""What several processes did, done again by one: the runtime and the lab agree to the bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from farflung import tape

RECIPE = """
scale = "micro"
num_learners = 3
steps = 300
pace_s = 0.03
evals = 0
restart_s = 0.2
eval_batches = 2

[policy]
num_fragments = 4
sync_every_steps = 8
lease_s = 2.0

[[faults]]
kind = "kill"
target = "learner-1"
at_progress = 0.15
"""


def farflung(folder: Path, *args: str) -> dict:
    command = [sys.executable, "-m", "farflung.cli", *args, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_run_with_a_rejoin_is_repeated_bit_for_bit_and_its_tape_replays(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(RECIPE)
    summary = farflung(tmp_path, "run", "r.toml", "--out", "one")
    assert (summary["kills"], summary["rejoins"]) == (1, 1)
    again = farflung(tmp_path, "lab", "--order", "one")
    assert again["agree"] and again["digest"] == summary["digest"]
    replayed = farflung(tmp_path, "replay", "one")
    assert replayed["same"] and len(replayed["machines"]) >= 5
    assert (tmp_path / "one" / tape.REPORT).exists()
