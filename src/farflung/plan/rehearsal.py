"""A run rehearsed: its syncer and learners, under virtual time, on pretended links. Nobody trains.

The machines, the hub, codecs and fragments are those of the run, so every object that travels has its true size
and every decision is taken by the code that took it. A step costs time and computes nothing, after a first one
that gives the optimizer the state that a joiner will fetch.
"""

import contextlib
from pathlib import Path
from random import Random
from typing import Any

import torch

from farflung import tape
from farflung.chaos.plan import Fault
from farflung.config import RunConfig, write_config
from farflung.engine.make import make_island, slot_sizes
from farflung.engine.trainer import Trainer
from farflung.lab.body import LocalBody, Slots, StateSlot
from farflung.lab.faults import LabFaults
from farflung.lab.island import VirtualIsland
from farflung.lab.lab import FileTape
from farflung.lab.step_times import LEAST
from farflung.lab.task_body import task_plan
from farflung.lab.virtual_run import VirtualRun
from farflung.plan.past import Past
from farflung.protocol import actions as act
from farflung.report.folder import read_folder
from farflung.report.history import Data
from farflung.report.summary import summary_of
from farflung.train.inner import ModelInner
from farflung.train.loop import InnerLoop
from farflung.train.shard import OwnSteps, Shard

MESSAGE_S = 0.001
"""A control message between two processes of one machine, mailboxes at both ends included: 0.5 to 2 ms."""


class Rehearsal:
    """One run, rehearsed.

    Args:
        past: what the run was given and what befell it.
        run_dir: an empty folder for tape and metrics.
    """

    def __init__(self, past: Past, run_dir: Path) -> None:
        self.past, self.config, self.run_dir = past, past.config, run_dir
        write_config(self.config, run_dir)
        self._tape = FileTape(run_dir)
        self._metrics: list[Data] = []
        self._chance = {name: Random(f"{self.config.recipe.seed}.{name}") for name in past.paces}
        config, plan = self.config, task_plan(self.config, self.config.task())
        self.run = PastRun(
            config.method, plan, run=config.run, learners=config.recipe.learners(),
            budget_tokens=config.budget_tokens, tape=self._tape, make_body=lambda island: idle_body(config),
            step_s=lambda island: self._step_s(island.name), control_s=lambda island: MESSAGE_S,
            transfer_s=lambda island, direction, num_bytes: past.object_s, merge_s=past.merge_s,
            pair_s=lambda name, a, b, num_bytes: past.object_s, starts_s=lambda name: past.paces[name].starts_s,
        )  # fmt: skip
        self.run.last_merges_s = list(past.last_merges_s)
        self._faults = PastFaults(self.run, past, self._record)

    def go(self) -> Data:
        """Live through it; returns what summary.json would say."""
        with contextlib.closing(self._tape):
            while self.run.finished is None and self.run.time.step():
                self._faults.review(self.run.syncer.ledger.tokens_trained / self.config.budget_tokens)
        tape.write_merged(self.run_dir)
        folder = read_folder(self.run_dir)
        folder.history.metrics = self._metrics
        moved = self.run.bytes_moved
        return summary_of(folder, {"bytes_up": moved["up"], "bytes_down": moved["down"]})

    def _step_s(self, name: str) -> float:
        pace = self.past.paces[name]
        jitter = self._chance[name].gauss(0.0, pace.spread) if pace.spread else 0.0
        return pace.cycle_s * max(LEAST, 1 + jitter)

    def _record(self, **details: Any) -> None:
        self._metrics.append({"t": self.run.now, "kind": "fault", **details})


class PastRun(VirtualRun):
    """As real processes have it: an object's own time comes on top of the line's, last merges take their own."""

    last_merges_s: list[float]

    def bulk_s(self, island: VirtualIsland, direction: str, num_bytes: int) -> float:
        own_s = self.transfer_s(island, direction, num_bytes)
        return island.trouble.bulk_s(direction, num_bytes, 0.0, self.now) + own_s

    def pair_bulk_s(self, name: str, sender: VirtualIsland, receiver: VirtualIsland, num_bytes: int) -> float:
        own_s = self.pair_s(name, sender, receiver, num_bytes)
        up_s = sender.trouble.bulk_s("up", num_bytes, 0.0, self.now)
        return max(up_s, receiver.trouble.bulk_s("down", num_bytes, 0.0, self.now)) + own_s

    def _perform(self, action: act.SyncerAction) -> None:
        if not isinstance(action, act.Merge):
            super()._perform(action)
            return
        takes_s = self.last_merges_s.pop(0) if action.final and self.last_merges_s else self.merge_s
        work, life = self.hub.begin(action), self.syncer_lives
        self.time.after(takes_s, lambda: self._merged(life, action, work))


class PastFaults(LabFaults):
    """Faults at the moments at which they happened; who was killed is back when it was back."""

    def __init__(self, run: VirtualRun, past: Past, record: Any) -> None:
        super().__init__(run, past.faults, 0.0, record)
        self._away_s = {name: list(times) for name, times in past.away_s.items()}

    def _act(self, fault: Fault) -> None:
        if fault.kind == "kill":
            self._restart_s = self._away_s[fault.target].pop(0)
        super()._act(fault)


def idle_body(config: RunConfig) -> LocalBody:
    """An island's trainer that takes one step and then only says so."""
    task, method, recipe = config.task(), config.method, config.recipe
    torch.set_num_threads(1)
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    shard = Shard(task, recipe.num_learners)
    loop = InnerLoop(task, model, optimizer, shard, rng_seed=recipe.seed)
    inner = ModelInner(model, optimizer, shard, {"schedule": OwnSteps(loop)})
    plan = task_plan(config, task)
    up, down = slot_sizes(plan, method)
    uplink, downlink, state = Slots(up), Slots(down), StateSlot()
    tensors, its_inner = make_island(model, plan, method, uplink, downlink, inner)
    trainer = Trainer(tensors, its_inner, put_state=state.put, get_state=state.get, save=lambda: None)
    taken: list[int] = []  # tokens of the one step

    def step(progress: float) -> tuple[int, float]:
        if not taken:
            assert trainer.begun is not None, "a step before the run has begun"
            shard.open(trainer.begun.index)
            taken.append(loop.step(progress).num_tokens)
        inner.count_step()
        return taken[0], 0.0

    return LocalBody(trainer, step, uplink, downlink, state)
