"""Machines, hub and islands over pretend links under virtual time: the whole protocol without a socket.

Everything that decides and everything that touches tensors is the product's own; only links, clocks and
processes are pretended. Time is a number; a run is a function of its arguments.
"""

import heapq
import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch
import xxhash
from torch import Tensor, nn

from farflung.core.fragments import FragmentPlan, make_plan
from farflung.core.vectors import describe
from farflung.engine.hub import HubState
from farflung.engine.island import Island
from farflung.engine.trainer import Trainer
from farflung.methods import Method
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import messages as msg
from farflung.protocol import mailbox as box
from farflung.protocol.learner import LearnerMachine
from farflung.protocol.syncer import SyncerMachine
from farflung.tape import Record

RUN = "pretend"


class QuadraticInner:
    """Plain SGD towards a target, with a step counter as the state that a donor hands over."""

    def __init__(self, model: nn.Module, target: float, lr: float = 0.1):
        self.model, self.target, self._lr = model, target, lr
        self.steps = 0
        self.cursor = 0

    def step(self) -> float:
        self.steps += 1
        self.cursor += 1
        loss = torch.zeros(())
        with torch.no_grad():
            for parameter in self.model.parameters():
                gap = parameter - self.target
                loss = loss + (gap * gap).sum() / 2
                parameter -= self._lr * gap
        return float(loss)

    def donate(self) -> bytes:
        return self.steps.to_bytes(8, "little")

    def receive(self, state: bytes) -> None:
        self.steps = int.from_bytes(state, "little")

    def digest(self, state: bytes) -> str:
        return xxhash.xxh3_128_hexdigest(state)

    def lr(self) -> float:
        return self._lr


def quadratic_model(seed: int = 0) -> nn.Module:
    """Four small matrices: enough to be cut into fragments."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Module()
    for index in range(4):
        model.register_parameter(f"w{index}", nn.Parameter(torch.randn(4, 3, generator=generator)))
    return model


@dataclass
class Link:
    """One direction of a connection: FIFO, with a latency."""

    latency_s: float
    last_s: float = 0.0


@dataclass(eq=False)
class PretendIsland:
    """One learner: process, sidecar and mailbox."""

    name: str
    world: "World"
    step_s: float
    target: float
    machine: LearnerMachine = field(init=False)
    trainer: Trainer = field(init=False)
    inner: QuadraticInner = field(init=False)
    connection: int | None = None
    alive: bool = True
    frozen_until_s: float = 0.0
    busy: bool = False
    finished: str | None = None
    state: bytes = b""
    generation: int = 0
    sequence: int = 0

    def start(self) -> None:
        world = self.world
        self.generation += 1
        self.alive, self.finished, self.busy = True, None, False
        model = quadratic_model(world.seed)
        self.inner = QuadraticInner(model, self.target)
        self.uplink: dict[int, Tensor] = {}
        self.downlink: dict[int, Tensor] = {}
        island = Island(model, world.plan, world.method, self._slot(self.uplink), self._slot(self.downlink, True))
        self.trainer = Trainer(
            island,
            self.inner,
            put_state=lambda state: setattr(self, "state", state),
            get_state=lambda: self.state,
            save=lambda: None,
        )
        self.machine = LearnerMachine(world.method.policy, learner=self.name)
        self.feed(
            ev.Reported(
                report=box.Ready(
                    learner=self.name, fingerprint=world.plan.fingerprint(), layout=world.plan.to_json(),
                    method=world.syncer.admission.method_digest,
                )
            )
        )  # fmt: skip
        self.link_up()

    def _slot(self, slots: dict[int, Tensor], down: bool = False) -> Callable[[int], Tensor]:
        def slot(p: int) -> Tensor:
            if p not in slots:
                hub = self.world.hub
                slots[p] = torch.zeros(hub.value_size(p) if down else hub.payload_size(p), dtype=torch.uint8)
            return slots[p]

        return slot

    def link_up(self) -> None:
        self.connection = next(self.world.connections)
        self.world.islands_by_connection[self.connection] = self
        self.world.to_hub(self, ev.Connected(connection=self.connection))
        self.feed(ev.LinkUp())

    def link_down(self) -> None:
        if self.connection is not None:
            connection, self.connection = self.connection, None
            self.world.to_hub_now(ev.Disconnected(connection=connection))
            self.feed(ev.LinkDown(reason="cut"))

    def kill(self) -> None:
        self.alive, connection, self.connection = False, self.connection, None
        if connection is not None:
            self.world.to_hub_now(ev.Disconnected(connection=connection))

    def feed(self, event: ev.LearnerEvent) -> None:
        if not self.alive:
            return
        now = self.world.now
        if now < self.frozen_until_s:
            self.later(self.frozen_until_s - now, lambda: self.feed(event))
            return
        actions = self.machine.handle(event, now)
        self.world.record(f"{self.name}.{self.generation}", event, actions)
        self.machine.validate()
        for action in actions:
            self.perform(action)

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        generation = self.generation

        def run() -> None:
            if self.generation == generation and self.alive:
                what()

        self.world.after(delay_s, run)

    def perform(self, action: act.LearnerAction) -> None:
        world = self.world
        match action:
            case act.Say():
                if self.connection is not None:
                    world.to_hub(self, ev.MessageArrived(connection=self.connection, message=action.message))
            case act.Post():
                self.trainer.take(action.command)
                self.later(0.0, self.turn)
            case act.Fetch():
                self.later(world.transfer_s, lambda: self._fetch(action))
            case act.FetchState():
                self.later(world.transfer_s, lambda: self._fetch_state(action))
            case act.Upload():
                self.later(world.transfer_s, lambda: self._upload(action))
            case act.CancelUpload():
                self.cancelled.add(action.object)
            case act.SetTimer():
                self._timer(action)
            case act.Connect():
                self.later(0.2, self.link_up)
            case act.Exit():
                self.finished = action.reason
            case act.Note():
                pass

    cancelled: set[str] = field(default_factory=set)
    timers: dict[str, int] = field(default_factory=dict)

    def _timer(self, action: act.SetTimer) -> None:
        number = self.timers[action.name] = self.timers.get(action.name, 0) + 1
        if action.at_s is not None:

            def fire() -> None:
                if self.timers[action.name] == number:
                    self.feed(ev.TimerFired(name=action.name))

            self.later(max(0.0, action.at_s - self.world.now), fire)

    def _fetch(self, action: act.Fetch) -> None:
        p, version = action.fragment, action.version
        try:
            value = self.world.hub.value_bytes(p, version)
        except KeyError:
            self.feed(ev.FetchFailed(fragment=p, version=version, reason="gone", gone=True))
            return
        self.trainer.island._downlink(p).copy_(torch.frombuffer(bytearray(value), dtype=torch.uint8))
        self.feed(ev.Fetched(fragment=p, version=version))

    def _fetch_state(self, action: act.FetchState) -> None:
        state = self.world.objects.get(f"state.{action.transfer}")
        if state is None:
            self.feed(ev.StateFetchFailed(transfer=action.transfer, reason="gone"))
        else:
            self.state = state
            self.feed(ev.StateFetched(transfer=action.transfer))

    def _upload(self, action: act.Upload) -> None:
        if action.object in self.cancelled:
            self.cancelled.discard(action.object)
            return
        if self.connection is None:  # a driver tries again until it is told not to
            self.later(0.1, lambda: self._upload(action))
            return
        if action.fragment is None:
            data = self.state
        elif action.seed:
            data = bytes(self.trainer.island._downlink(action.fragment).numpy())
        else:
            data = bytes(self.trainer.island._uplink(action.fragment).numpy())
        self.world.objects[action.object] = data
        self.feed(ev.Uploaded(object=action.object, transfer_s=self.world.transfer_s))

    # ---- training ------------------------------------------------------------------------------------

    def turn(self) -> None:
        """The trainer looks at its mailbox, and begins a step if it may."""
        if self.busy:
            return
        self.trainer.idle()
        self._report()
        if self.trainer.may_step()[0] and self.finished is None:
            self.busy = True
            self.later(self.step_s, self._step_end)

    def _step_end(self) -> None:
        if self.world.now < self.frozen_until_s:
            self.later(self.frozen_until_s - self.world.now, self._step_end)
            return
        self.busy = False
        loss = self.inner.step()
        self.trainer.stepped(self.world.tokens_per_step, step_s=self.step_s, loss=loss)
        self._report()
        self.turn()

    def _report(self) -> None:
        reports, self.trainer.reports = self.trainer.reports, []
        for report in reports:
            self.feed(ev.Reported(report=report))


class World:
    """A syncer and its islands.

    Args:
        method: the method, with its policy.
        step_s: seconds of a step, one number for each island.
        budget_tokens: of the whole run.
        targets: each island pulls the parameters towards its own.
        latency_s: one way, control. transfer_s: any bulk object.
    """

    def __init__(
        self,
        method: Method,
        step_s: list[float],
        budget_tokens: int,
        *,
        seed: int = 0,
        targets: list[float] | None = None,
        latency_s: float = 0.01,
        transfer_s: float = 0.02,
        tokens_per_step: int = 10,
    ):
        self.method, self.seed = method, seed
        self.latency_s, self.transfer_s, self.tokens_per_step = latency_s, transfer_s, tokens_per_step
        self.now = 0.0
        self.plan: FragmentPlan = make_plan(
            describe(quadratic_model(seed)), method.policy.num_fragments, method.policy.fragment_plan
        )
        self.hub = HubState(self.plan, method)
        self.syncer = SyncerMachine(
            method.policy, run=RUN, num_learners=len(step_s), budget_tokens=budget_tokens
        )
        self.connections = itertools.count(1)
        self.objects: dict[str, bytes] = {}
        self.records: list[Record] = []
        self.finished: str | None = None
        self.islands_by_connection: dict[int, PretendIsland] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._timers: dict[str, int] = {}
        self._fifo: dict[tuple[int, str], float] = {}
        self.islands = [
            PretendIsland(f"learner-{i}", self, s, (targets or [0.0] * len(step_s))[i])
            for i, s in enumerate(step_s)
        ]
        for island in self.islands:
            self.after(0.0, island.start)

    # ---- time ----------------------------------------------------------------------------------------

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._count), what))

    def run(self, until_s: float = 1e9, events: int = 1_000_000) -> None:
        """Run until the syncer is finished, the time is over or too much happened."""
        while self._heap and self.finished is None and events:
            if self._heap[0][0] > until_s:
                break
            self.now, _, what = heapq.heappop(self._heap)
            what()
            events -= 1
        if self.finished is None and not events:
            raise AssertionError("the world does not come to an end")

    # ---- the syncer ----------------------------------------------------------------------------------

    def to_hub(self, island: PretendIsland, event: ev.SyncerEvent) -> None:
        connection = island.connection

        def arrive() -> None:
            if island.connection == connection:  # a disconnection loses the tail
                self._take(event)

        self._deliver((connection or 0, "up"), arrive)

    def to_hub_now(self, event: ev.SyncerEvent) -> None:
        self._take(event)

    def _deliver(self, line: tuple[int, str], what: Callable[[], None]) -> None:
        at = max(self.now + self.latency_s, self._fifo.get(line, 0.0))
        self._fifo[line] = at
        self.after(at - self.now, what)

    def _take(self, event: ev.SyncerEvent) -> None:
        if isinstance(event, ev.MessageArrived):
            event = self._inspect(event)
        actions = self.syncer.handle(event, self.now)
        self.record("syncer", event, actions)
        self.syncer.validate()
        for action in actions:
            self._perform(action)

    def _inspect(self, event: ev.MessageArrived) -> ev.MessageArrived:
        """What the real driver finds in the objects that a message speaks of."""
        message = event.message
        name = self.syncer.membership.connections.get(event.connection)
        if name is None:
            return event
        incarnation = self.syncer.membership.members[name].incarnation
        if isinstance(message, msg.Contribute):
            object_name = f"contribution.{name}.{incarnation}.{message.fragment}.{message.round}"
            payload = self.objects.pop(object_name, None)
            if payload is None:
                return msgspec.structs.replace(event, problem="missing: no such object")
            received = self.hub.receive(object_name, message.fragment, payload)
            return msgspec.structs.replace(event, finite=received.finite, norm=received.norm)
        if isinstance(message, msg.Seeded):
            found = [
                self.hub.seed(p, self.objects.pop(f"seed.{name}.{incarnation}.{p}"))
                for p in range(self.plan.num_fragments)
            ]
            digests = [self.hub.digest(p, 0) for p in range(self.plan.num_fragments)]
            return msgspec.structs.replace(event, finite=all(f.finite for f in found), digests=digests)
        return event

    def _perform(self, action: act.SyncerAction) -> None:
        match action:
            case act.Send():
                self._send(action)
            case act.SetTimer():
                self._timer(action)
            case act.Merge():
                self.after(0.001, lambda: self._merge(action))
            case act.Discard():
                self.hub.discard(action.object)
            case act.Retire():
                self.hub.retire(action.fragment, action.version)
            case act.WriteCheckpoint():
                self.after(0.0, lambda: self._take(ev.CheckpointWritten()))
            case act.Finished():
                self.finished = action.reason
            case _:
                pass

    def _send(self, action: act.Send) -> None:
        island = self.islands_by_connection.get(action.connection)
        if island is None:
            return
        connection = action.connection

        def arrive() -> None:
            if island.connection == connection:
                island.feed(ev.Received(message=action.message))

        self._deliver((connection, "down"), arrive)

    def _merge(self, action: act.Merge) -> None:
        merged = self.hub.merge(action)
        self._take(
            ev.MergeDone(
                fragment=action.fragment, version=merged.version, finite=merged.finite,
                norm=merged.norm, digest=merged.digest, merge_s=0.001,
            )
        )  # fmt: skip

    def _timer(self, action: act.SetTimer) -> None:
        number = self._timers[action.name] = self._timers.get(action.name, 0) + 1
        if action.at_s is not None:

            def fire() -> None:
                if self._timers[action.name] == number:
                    self._take(ev.TimerFired(name=action.name))

            self.after(max(0.0, action.at_s - self.now), fire)

    # ---- the story -----------------------------------------------------------------------------------

    def record(self, node: str, event: msgspec.Struct, actions: list) -> None:
        for kind, item in [("event", event), *(("action", a) for a in actions)]:
            self.records.append(Record(self.now, node, len(self.records), kind, msgspec.to_builtins(item)))

    def notes(self, kind: str) -> list[dict]:
        return [r.data["data"] for r in self.records if r.type == "Note" and r.data["kind"] == kind]

    def story(self, last: int = 60) -> str:
        """The end of the tape, for a failing assertion."""
        out = io.StringIO()
        for r in self.records[-last:]:
            out.write(f"{r.t:9.3f} {r.node:12} {r.kind:6} {r.data}\n")
        return out.getvalue()
