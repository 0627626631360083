"""How fast the machines decide: events per second, against a heap loop that does nothing with them.

One run in the lab is recorded once: a syncer and eight learners, 24 fragments, a boundary report every step. Then
its events go through fresh machines, in the order of their time, out of a heap; and through the same heap to a
function that does nothing. No tensor, no tape and no link in either.
"""

import gc
import heapq
import random
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from farflung.bench.measure import Measurement, Settings, Speed, interleave
from farflung.core.fragments import make_plan
from farflung.core.vectors import describe
from farflung.engine.island import Island
from farflung.engine.trainer import Trainer
from farflung.lab.body import LocalBody, Slots, StateSlot
from farflung.lab.island import VirtualIsland
from farflung.lab.virtual_run import VirtualRun
from farflung.methods import Method, decoupled
from farflung.protocol.learner import LearnerMachine
from farflung.protocol.syncer import SyncerMachine
from farflung.testing.quadratic import QuadraticInner

AIM = 0.1
NUM_LEARNERS = 8  # M
NUM_FRAGMENTS = 24  # P
SYNC_EVERY_STEPS = 24  # H
IN_HEAP = 64  # moments that wait at once, as in a lab
TOKENS_PER_STEP = 10
RUN = "bench"

Moment = tuple[float, str, Any]
"""When, which machine, what event."""


class EventLog:
    """A tape that keeps the events themselves."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []

    def open(self, node: str, machine: Any) -> None:
        pass

    def handle(self, node: str, machine: Any, event: Any, now: float) -> Sequence[Any]:
        self.moments.append((now, node, event))
        actions: Sequence[Any] = machine.handle(event, now)
        return actions


def measure_machines(settings: Settings) -> Measurement:
    """Events per second through the machines against the bare loop."""
    method = decoupled(num_fragments=NUM_FRAGMENTS, sync_every_steps=SYNC_EVERY_STEPS)
    budget_tokens = settings.machine_steps * NUM_LEARNERS * TOKENS_PER_STEP
    moments = record(method, budget_tokens)
    nodes = sorted({node for _, node, _ in moments})

    def machines() -> dict[str, Callable[[Any, float], Any]]:
        return {node: _machine(node, method, budget_tokens).handle for node in nodes}

    gc.collect()
    gc.freeze()  # the recording is no garbage of a run
    try:
        ours = _speed(moments, machines)
        bare = _speed(moments, lambda: dict.fromkeys(nodes, lambda event, now: None))
        ratios, per_s = interleave(ours, bare, settings.repetitions)
    finally:
        gc.unfreeze()
    return Measurement(
        ratios=ratios,
        reference=per_s / 1e6,
        unit="M events/s",
        what="events/s through syncer and learner machines, against a heap loop with the same events and nothing "
        "done",
        aim=AIM,
        note=f"M = {NUM_LEARNERS}, P = {NUM_FRAGMENTS}, H = {SYNC_EVERY_STEPS}, {len(moments)} events",
    )


def record(method: Method, budget_tokens: int) -> list[Moment]:
    """Every event of a run on a model of one tiny matrix a fragment, a few milliseconds a step."""
    log, draw = EventLog(), random.Random(0)
    plan = make_plan(describe(_model()), NUM_FRAGMENTS, "balanced")

    def make_body(island: VirtualIsland) -> LocalBody:
        model, state = _model(), StateSlot()
        uplink, downlink = Slots(run.hub.payload_size), Slots(run.hub.value_size)
        inner = QuadraticInner(model, 0.0)
        trainer = Trainer(
            Island(model, plan, method, uplink, downlink), inner,
            put_state=state.put, get_state=state.get, save=lambda: None,
        )  # fmt: skip
        return LocalBody(trainer, lambda progress: (TOKENS_PER_STEP, inner.step()), uplink, downlink, state)

    run = VirtualRun(
        method, plan, run=RUN, learners=[f"learner-{i}" for i in range(NUM_LEARNERS)],
        budget_tokens=budget_tokens, tape=log, make_body=make_body,
        step_s=lambda island: draw.uniform(0.09, 0.11), control_s=lambda island: 0.01,
        transfer_s=lambda island, direction, num_bytes: 0.03, merge_s=0.005,
    )  # fmt: skip
    while run.finished is None and run.time.step():
        pass
    return log.moments


def _model() -> nn.Module:
    model = nn.Module()
    for p in range(NUM_FRAGMENTS):
        model.register_parameter(f"w{p}", nn.Parameter(torch.full((2, 2), float(p))))
    return model


def _machine(node: str, method: Method, budget_tokens: int) -> SyncerMachine | LearnerMachine:
    if node == "syncer":
        return SyncerMachine(method.policy, run=RUN, num_learners=NUM_LEARNERS, budget_tokens=budget_tokens)
    return LearnerMachine(method.policy, learner=node)


def _speed(moments: list[Moment], handlers: Callable[[], dict[str, Callable[[Any, float], Any]]]) -> Speed:
    """Events/s of a heap loop: a moment comes out, is handled, and the next one goes in."""

    def measured() -> float:
        handle, rest = handlers(), enumerate(moments)
        began_s = time.perf_counter()
        heap = [(t, number, node, event) for number, (t, node, event) in islice(rest, IN_HEAP)]
        while heap:
            now, _, node, event = heapq.heappop(heap)
            handle[node](event, now)
            following = next(rest, None)
            if following is not None:
                number, (t, node, event) = following
                heapq.heappush(heap, (t, number, node, event))
        return len(moments) / (time.perf_counter() - began_s)

    return measured
