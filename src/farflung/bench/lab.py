"""What the lab costs: a whole run in virtual time, against the same training steps and nothing else.

Both sides train the same learners on the same data in the same number of worker processes. The lab's time runs
from the first moment of virtual time to the end of the hand-in: machines, hub, merges, codecs, simulated links,
both evaluations. Building the models is in both, starting processes in neither. The ratio is of times: 1 costs
nothing, and less is better.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from farflung.bench.measure import Measurement, Settings, interleave
from farflung.bench.random_text import random_text
from farflung.config import RunConfig, resolve, write_config
from farflung.lab.lab import Lab
from farflung.recipe import make_recipe

AIM = 1.1
NUM_WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the lab is to do."""

    method: str
    policy: dict[str, Any]
    scale: str
    num_learners: int
    steps: int  # of each learner


def few(settings: Settings) -> Job:
    """Four learners and a syncer."""
    return Job(
        method="decoupled", policy={"num_fragments": 6, "sync_every_steps": 24}, scale=settings.lab_scale,
        num_learners=4, steps=settings.lab_steps,
    )  # fmt: skip


def crowd(settings: Settings) -> Job:
    """Hundreds of gossip partners."""
    return Job(
        method="gasloc", policy={"sync_every_steps": 10, "gathers": 0}, scale="micro",
        num_learners=settings.lab_crowd, steps=settings.lab_crowd_steps,
    )  # fmt: skip


class BareWorker:
    """A process that trains its share of the learners, so many steps when told."""

    def __init__(self, folder: Path, indices: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "farflung.bench.bare_steps", str(folder), *map(str, indices)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def __enter__(self) -> "BareWorker":
        return self

    def __exit__(self, *error: object) -> None:
        with self._process:  # closes the pipes, which ends it, and waits
            pass

    def begin(self, num_steps: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_steps}\n")
        self._process.stdin.flush()

    def wait(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError("lab_overhead: the process that trains alone has ended")


def measure_lab(settings: Settings, make_job: Callable[[Settings], Job] = few) -> Measurement:
    """Seconds a step in the lab against seconds a step of training alone."""
    job = make_job(settings)
    with tempfile.TemporaryDirectory(prefix="farflung-bench-") as folder:
        config = _config(settings, job, Path(folder))
        with _bare_workers(Path(folder), job.num_learners) as workers:

            def bare() -> float:
                began_s = time.perf_counter()
                for worker in workers:
                    worker.begin(job.steps)
                for worker in workers:
                    worker.wait()
                return (time.perf_counter() - began_s) / (job.num_learners * job.steps)

            bare()  # a warm-up
            ratios, step_s = interleave(lambda: _lab_step_s(config), bare, settings.lab_repetitions)
    return Measurement(
        ratios=ratios,
        reference=1e3 * step_s,
        unit="ms a step",
        what="time of a lab run, workers and all, over the time of the same training steps alone; less is better",
        aim=AIM,
        less_is_better=True,
        note=f"{job.method}, scale {job.scale}, {job.num_learners} learners, {NUM_WORKERS} workers, "
        f"{job.steps} steps each",
    )


def _lab_step_s(config: RunConfig) -> float:
    """Seconds of the whole run for each step that was trained in it."""
    lab = Lab(config, None)
    lab.wait_for_workers()
    began_s = time.perf_counter()
    lab.go()
    took_s = time.perf_counter() - began_s
    return took_s / sum(member.steps_done for member in lab.run.syncer.membership.sorted())


@contextmanager
def _bare_workers(folder: Path, num_learners: int) -> Iterator[list[BareWorker]]:
    with ExitStack() as stack:
        shares = [range(first, num_learners, NUM_WORKERS) for first in range(NUM_WORKERS)]
        workers = [stack.enter_context(BareWorker(folder, share)) for share in shares]
        for worker in workers:
            worker.wait()
        yield workers


def _config(settings: Settings, job: Job, folder: Path) -> RunConfig:
    recipe = make_recipe(
        {
            "method": job.method, "policy": job.policy, "scale": job.scale,
            "num_learners": job.num_learners, "steps": job.steps, "evals": 0, "eval_batches": 1,
            "threads": settings.threads, "lab": {"workers": NUM_WORKERS, "jitter": 0.05},
            "data": {"path": str(random_text(folder))},
        }
    )  # fmt: skip
    config = msgspec.structs.replace(resolve(recipe, "bench"), started_s=0.0)
    write_config(config, folder)
    return config
