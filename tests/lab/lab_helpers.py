"""Small runs in the lab."""

from pathlib import Path
from typing import Any

from farflung.config import RunConfig, write_config
from farflung.lab.start import lab_config, run_lab
from farflung.recipe import make_recipe
from farflung.report.closing import close_run

SMALL: dict[str, Any] = {
    "scale": "micro", "num_learners": 3, "steps": 16, "batch_size": 2, "evals": 1, "eval_batches": 1,
    "restart_s": 0.1, "policy": {"num_fragments": 4, "sync_every_steps": 8, "lease_s": 2.0},
    "lab": {"jitter": 0.2, "up_mbps": 40.0, "down_mbps": 80.0, "startup_s": 0.3, "workers": 0},
    "faults": [{"kind": "kill", "target": "learner-1", "at_progress": 0.3}],
}  # fmt: skip


def small(**changes: Any) -> RunConfig:
    return lab_config(make_recipe({**SMALL, **changes}))


def reference(**changes: Any) -> RunConfig:
    """A data-parallel run without faults, unless they are given."""
    return small(**{"method": "data_parallel", "policy": {}, "faults": [], **changes})


def run(config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """A run folder; returns its summary."""
    run_dir.mkdir()
    write_config(config, run_dir)
    return close_run(run_dir, run_lab(config, run_dir))
