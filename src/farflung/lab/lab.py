"""`farflung lab`: a recipe's run in virtual time, with real training; deterministic.

The machines, the hub, the islands and the inner loop are those of `farflung run`. Equal recipes give equal tapes,
byte for byte, on any number of workers.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from farflung import tape
from farflung.config import RunConfig
from farflung.lab.body import Body
from farflung.lab.faults import LabFaults
from farflung.lab.garbage import collected_seldom
from farflung.lab.island import VirtualIsland
from farflung.lab.links import link_specs, shared_uplinks
from farflung.lab.network import Network
from farflung.lab.step_times import StepTimes
from farflung.lab.task_body import task_body, task_plan
from farflung.lab.virtual_run import VirtualRun
from farflung.lab.workers import RemoteBody, Worker
from farflung.recorder import Recorder


class FileTape:
    """Segments of a run folder, written as the machines go; without a folder only the machines run."""

    def __init__(self, run_dir: Path | None) -> None:
        self._run_dir = run_dir
        self._recorders: dict[str, Recorder] = {}
        self._full: set[str] = set()  # whose disk is full
        self.now = 0.0

    def open(self, node: str, machine: Any) -> None:
        path = None if self._run_dir is None else self._run_dir / tape.TAPE_DIR / f"{node}.jsonl"
        recorder = self._recorders[node] = Recorder(machine, node, lambda: self.now, path)
        recorder.fill_disk(node.partition(".")[0] in self._full)

    def fill_disk(self, name: str, full: bool) -> None:
        """Nothing can be written for a learner or the syncer; or it can again."""
        (self._full.add if full else self._full.discard)(name)
        for node, recorder in self._recorders.items():
            if node.partition(".")[0] == name:
                recorder.fill_disk(full)

    @property
    def failed_writes(self) -> int:
        """Writes that found a full disk."""
        return sum(recorder.failed_writes for recorder in self._recorders.values())

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
        self.faults: list[dict[str, Any]] = []  # those that happened, as in the folder's metrics
        self.kills = 0
        self._tape = FileTape(run_dir)
        self._metrics = None if run_dir is None else (run_dir / tape.METRICS).open("w")
        self._network = Network(link_specs(recipe), shared_uplinks(recipe))
        self._step_times = StepTimes(recipe)
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
            step_s=lambda island: self._step_times.next_s(island.name),
            control_s=self.control_s,
            transfer_s=self._transfer_s,
            merge_s=recipe.lab.merge_s,
            pair_s=self._pair_s,
            release=self._release,
            mbps=self._mbps,
        )
        self._scale = self._payload_scale()
        restart_s = recipe.restart_s + recipe.lab.startup_s
        self._faults = LabFaults(self.run, recipe.plan(), restart_s, self._record_fault, self._tape.fill_disk)
        self._evaluated = 0

    def wait_for_workers(self) -> None:
        """Return when every worker process is up; `go` waits for them by itself."""
        for worker in self._workers:
            worker.wait_until_up()

    def go(self) -> dict[str, Any]:
        """Run to the end; returns what only the driver knows of it."""
        try:
            self._evaluate(self.task.build_model().state_dict(), 0)
            with collected_seldom():
                while self.run.finished is None and self.run.time.step():
                    self._review()
            each = self.config.policy.topology == "gossip" and self.config.recipe.evals > 0
            workers = {"workers": self._worker_losses()} if each else {}
            self._evaluate(self.run.hub.model_tensors(), self.run.syncer.ledger.tokens_trained, **workers)
            return self._results()
        finally:
            self._tape.close()
            for worker in self._workers:
                worker.close()
            for worker in self._workers:
                worker.wait()
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
        return RemoteBody(self._workers[index % len(self._workers)], self._bodies, self.run.plan)

    def control_s(self, island: VirtualIsland) -> float:
        """Virtual seconds of a control message, one way."""
        return self._network.links[island.name].latency_s

    def _transfer_s(self, island: VirtualIsland, direction: str, num_bytes: int) -> float:
        if direction == "up" and self.config.policy.topology == "gossip":
            return self.control_s(
                island
            )  # shown for an average: a measurement, for which links are not slowed
        num_bytes = round(num_bytes * self._scale)
        return self._network.bulk(island.name, direction, num_bytes, self.run.now) - self.run.now

    def _pair_s(self, name: str, sender: VirtualIsland, receiver: VirtualIsland, num_bytes: int) -> float:
        num_bytes = round(num_bytes * self._scale)
        return self._network.pair(name, sender.name, receiver.name, num_bytes, self.run.now) - self.run.now

    def _release(self, name: str, sender: VirtualIsland, receiver: VirtualIsland) -> None:
        self._network.release(name, sender.name, receiver.name, self.run.now)

    def _mbps(self, island: VirtualIsland) -> float | None:
        link = self._network.links[island.name]
        bps = min(link.up_bps, link.down_bps)
        return bps / 1e6 if bps < float("inf") else None

    def _payload_scale(self) -> float:
        """How many bytes a byte stands for, where the recipe pretends that the model is larger."""
        if self.config.recipe.lab.model_bytes is None:
            return 1.0
        return self.config.recipe.lab.model_bytes / sum(
            self.run.hub.value_size(p) for p in range(self.run.plan.num_fragments)
        )

    # ---- watching ------------------------------------------------------------------------------------

    def _review(self) -> None:
        tokens = self.run.syncer.ledger.tokens_trained
        progress = tokens / self.config.budget_tokens
        self._faults.review(progress)
        evals = self.config.recipe.evals
        if (
            self.config.policy.topology == "gossip"
        ):  # there is something to evaluate when an average was taken
            if evals and self.run.hub.versions[0] > self._evaluated and self.run.finished is None:
                self._evaluated = self.run.hub.versions[0]
                self._evaluate(self.run.hub.model_tensors(), tokens)
        elif evals and self.run.syncer.phase == "training" and progress * (evals + 1) >= self._evaluated + 1:
            self._evaluated = int(progress * (evals + 1))
            self._evaluate(self.run.hub.model_tensors(), tokens)

    def _worker_losses(self) -> dict[str, float]:
        """Gossip: the loss of each learner's own parameters, as handed in."""
        shown = self.run.hub.shown().items()
        return {learner: self.task.evaluate(self._model(tensors)) for learner, tensors in shown}

    def _model(self, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
        model = self.task.build_model()
        model.load_state_dict(tensors, strict=False)
        return model

    def _evaluate(self, tensors: dict[str, torch.Tensor], tokens: int, **more: Any) -> None:
        versions = list(self.run.hub.versions) if tokens else []
        record = {
            "t": self.run.now, "kind": "eval", "tokens": tokens, **self.task.evaluation(self._model(tensors)),
            "versions": versions, "bytes_up": self.run.bytes_moved["up"],
            "bytes_down": self.run.bytes_moved["down"], **more,
        }  # fmt: skip
        self.evals.append(record)
        self._write(record)
        self._show(record)

    def _record_fault(self, **details: Any) -> None:
        self.kills += details["fault"] == "kill"
        self.faults.append({"t": self.run.now, "kind": "fault", **details})
        self._write(self.faults[-1])

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
            "bytes_by": self.run.bytes.rows(),
            "rejoins": self.run.syncer.admission.rejoins,
            "digest": self.run.hub.model_digest(),
            "kills": self.kills,
            "failed_writes": self._tape.failed_writes,
            "wall_s": self.run.now,
        }
