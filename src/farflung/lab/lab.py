"""`farflung lab`: a recipe's run in virtual time, with real training; deterministic.

The machines, the hub, the islands and the inner loop are those of `farflung run`. Equal recipes give equal tapes,
byte for byte, on any number of workers.
"""

import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from farflung import tape
from farflung.config import RunConfig
from farflung.lab.body import Body
from farflung.lab.faults import LabFaults
from farflung.lab.island import VirtualIsland
from farflung.lab.network import LinkSpec, Network, SharedUplink
from farflung.lab.task_body import task_body, task_plan
from farflung.lab.virtual_run import VirtualRun
from farflung.lab.workers import RemoteBody, Worker
from farflung.recipe import Recipe
from farflung.recorder import Recorder


class FileTape:
    """Segments of a run folder, written as the machines go; without a folder only the machines run."""

    def __init__(self, run_dir: Path | None) -> None:
        self._run_dir = run_dir
        self._recorders: dict[str, Recorder] = {}
        self.now = 0.0

    def open(self, node: str, machine: Any) -> None:
        path = None if self._run_dir is None else self._run_dir / tape.TAPE_DIR / f"{node}.jsonl"
        self._recorders[node] = Recorder(machine, node, lambda: self.now, path)

    def handle(self, node: str, machine: Any, event: Any, now: float) -> Sequence[Any]:
        self.now = now
        return self._recorders[node].handle(event)

    def close(self) -> None:
        for recorder in self._recorders.values():
            recorder.close()


class Lab:
    """One run in virtual time.

    Args:
        config: resolved.
        run_dir: where tape, metrics and model go; None keeps nothing but the figures.
        show: called with each evaluation.
    """

    def __init__(
        self, config: RunConfig, run_dir: Path | None, show: Callable[[dict[str, Any]], None] = lambda r: None
    ) -> None:
        recipe = config.recipe
        torch.set_num_threads(recipe.threads)
        self.config, self.run_dir, self._show = config, run_dir, show
        self.task = config.task()
        self.evals: list[dict[str, Any]] = []
        self.kills = 0
        self._tape = FileTape(run_dir)
        self._metrics = None if run_dir is None else (run_dir / tape.METRICS).open("w")
        self._network = Network(link_specs(recipe), [
            SharedUplink(learners=s.learners, bps=s.mbps * 1e6) for s in recipe.lab.shared_uplinks
        ])  # fmt: skip
        self._own_step_s = dict(zip(recipe.learners(), per_learner(recipe, "step_s"), strict=True))
        self._jitter = {name: random.Random(f"{recipe.seed}.{name}") for name in recipe.learners()}
        cores = os.cpu_count() or 1 if recipe.lab.workers is None else recipe.lab.workers
        self._workers = [Worker(config) for _ in range(min(cores, recipe.num_learners))]
        self._bodies = 0
        self.run = VirtualRun(
            config.method,
            task_plan(config, self.task),
            run=config.run,
            learners=recipe.learners(),
            budget_tokens=config.budget_tokens,
            tape=self._tape,
            make_body=self._make_body,
            step_s=self._step_s,
            control_s=lambda island: self._network.links[island.name].latency_s,
            transfer_s=self._transfer_s,
            merge_s=recipe.lab.merge_s,
        )
        self._faults = LabFaults(self.run, recipe, self._record_fault)
        self._evaluated = 0

    def go(self) -> dict[str, Any]:
        """Run to the end; returns what only the driver knows of it."""
        try:
            self._evaluate(self.task.build_model().state_dict(), 0)
            while self.run.finished is None and self.run.time.step():
                self._review()
            self._evaluate(self.run.hub.model_tensors(), self.run.syncer.ledger.tokens_trained)
            return self._results()
        finally:
            self._tape.close()
            for worker in self._workers:
                worker.close()
            if self._metrics is not None:
                self._metrics.close()

    # ---- what is pretended ---------------------------------------------------------------------------

    def _make_body(self, island: VirtualIsland) -> Body:
        self._bodies += 1
        if island.generation > 1:
            self._record("process", learner=island.name, event="restarted")
        if not self._workers:
            return task_body(self.config, self.task)
        index = self.config.recipe.learners().index(island.name)
        return RemoteBody(self._workers[index % len(self._workers)], self._bodies)

    def _step_s(self, island: VirtualIsland) -> float:
        """The island's time for its next step: never less than a fifth of the usual."""
        usual: float = self._own_step_s[island.name]
        jitter = self.config.recipe.lab.jitter
        if not jitter:
            return usual
        return usual * max(0.2, 1 + self._jitter[island.name].gauss(0.0, jitter))

    def _transfer_s(self, island: VirtualIsland, direction: str, num_bytes: int) -> float:
        return self._network.bulk(island.name, direction, num_bytes, self.run.now) - self.run.now

    # ---- watching ------------------------------------------------------------------------------------

    def _review(self) -> None:
        tokens = self.run.syncer.ledger.tokens_trained
        progress = tokens / self.config.budget_tokens
        self._faults.review(progress)
        evals = self.config.recipe.evals
        if evals and self.run.syncer.phase == "training" and progress * (evals + 1) >= self._evaluated + 1:
            self._evaluated = int(progress * (evals + 1))
            self._evaluate(self.run.hub.model_tensors(), tokens)

    def _evaluate(self, tensors: dict[str, torch.Tensor], tokens: int) -> None:
        model = self.task.build_model()
        model.load_state_dict(tensors, strict=False)
        versions = list(self.run.hub.versions) if tokens else []
        record = {
            "t": self.run.now, "kind": "eval", "tokens": tokens, "loss": self.task.evaluate(model),
            "versions": versions,
        }  # fmt: skip
        self.evals.append(record)
        self._write(record)
        self._show(record)

    def _record_fault(self, **details: Any) -> None:
        self.kills += details["fault"] == "kill"
        self._record("fault", **details)

    def _record(self, kind: str, **details: Any) -> None:
        self._write({"t": self.run.now if hasattr(self, "run") else 0.0, "kind": kind, **details})

    def _write(self, record: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.write(json.dumps(record) + "\n")

    def _results(self) -> dict[str, Any]:
        if self.run_dir is not None:
            tensors = self.run.hub.model_tensors()
            tape.write_atomically(self.run_dir / tape.MODEL, safetensors.torch.save(tensors))
        return {
            "outcome": self.run.finished or "stalled",
            "bytes_up": self.run.bytes_moved["up"],
            "bytes_down": self.run.bytes_moved["down"],
            "rejoins": self.run.syncer.admission.rejoins,
            "digest": self.run.hub.model_digest(),
            "kills": self.kills,
            "wall_s": self.run.now,
        }


def per_learner(recipe: Recipe, field: str) -> list[Any]:
    """A lab option as a list with one entry a learner."""
    value = getattr(recipe.lab, field)
    return list(value) if isinstance(value, list) else [value] * recipe.num_learners


def link_specs(recipe: Recipe) -> dict[str, LinkSpec]:
    """Each learner's link."""
    columns = zip(
        recipe.learners(), per_learner(recipe, "latency_s"), per_learner(recipe, "up_mbps"),
        per_learner(recipe, "down_mbps"), strict=True,
    )  # fmt: skip
    free = float("inf")
    return {
        name: LinkSpec(
            latency_s=latency_s,
            up_bps=free if up is None else up * 1e6,
            down_bps=free if down is None else down * 1e6,
        )
        for name, latency_s, up, down in columns
    }
