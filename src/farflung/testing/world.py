"""Machines, hub and islands over pretended links under virtual time: the whole protocol without a socket.

Everything that decides and everything that touches tensors is the product's own; only links, clocks and
processes are pretended. A run is a function of its arguments.
"""

import itertools
from collections.abc import Callable, Sequence

import msgspec

from farflung.core.fragments import FragmentPlan, make_plan
from farflung.core.vectors import describe
from farflung.engine.hub import HubState
from farflung.methods import Method
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import messages as msg
from farflung.protocol import objects
from farflung.protocol.syncer import SyncerMachine
from farflung.testing.island import PretendIsland
from farflung.testing.quadratic import quadratic_model
from farflung.testing.tapes import MemoryTape
from farflung.testing.virtual_time import Timers, VirtualTime, What

RUN = "pretended"
MERGE_S = 0.001


class World:
    """A syncer and its islands.

    Args:
        method: the method, with its policy.
        step_s: seconds of a step, one number for each island.
        budget_tokens: of the whole run.
        seed: of the first parameters.
        targets: where each island's data pulls the parameters; 0 for all by default.
        latency_s: of a control message, one way.
        transfer_s: of a bulk object: a number, or a function that gives one for each.
        tokens_per_step: of every island.

    >>> from farflung.methods import decoupled
    >>> world = World(decoupled(num_fragments=2, sync_every_steps=4), [0.1, 0.2], 400).run()
    >>> world.finished, world.syncer.ledger.in_flight
    ('finished', 0)
    """

    def __init__(
        self,
        method: Method,
        step_s: Sequence[float],
        budget_tokens: int,
        *,
        seed: int = 0,
        targets: Sequence[float] | None = None,
        latency_s: float = 0.01,
        transfer_s: float | Callable[[], float] = 0.02,
        tokens_per_step: int = 10,
    ):
        self.method, self.seed = method, seed
        self.latency_s, self.tokens_per_step = latency_s, tokens_per_step
        self._transfer_s = transfer_s
        self.time, self.tape = VirtualTime(), MemoryTape()
        policy = method.policy
        specs = describe(quadratic_model(seed))
        self.plan: FragmentPlan = make_plan(specs, policy.num_fragments, policy.fragment_plan)
        self.hub = HubState(self.plan, method)
        self.syncer = SyncerMachine(policy, run=RUN, num_learners=len(step_s), budget_tokens=budget_tokens)
        self.objects: dict[str, bytes] = {}  # uploaded and not yet taken, by name
        self.uploads: dict[str, bytes] = {}  # all that was ever uploaded
        self.finished: str | None = None
        self._timers = Timers(self.time, lambda name: self.take(ev.TimerFired(name=name)))
        self._connections = itertools.count(1)
        self._islands: dict[int, PretendIsland] = {}  # by connection
        self._last_s: dict[tuple[int, str], float] = {}  # (connection, direction): its newest arrival
        targets = targets or [0.0] * len(step_s)
        self.islands = [
            PretendIsland(f"learner-{i}", self, s, target)
            for i, (s, target) in enumerate(zip(step_s, targets, strict=True))
        ]
        for island in self.islands:
            self.time.after(0.0, island.start)

    @property
    def now(self) -> float:
        return self.time.now

    def transfer_s(self) -> float:
        """How long the next bulk object takes."""
        return self._transfer_s() if callable(self._transfer_s) else self._transfer_s

    def at(self, moment_s: float, what: What) -> None:
        """Let something happen, a fault for instance."""
        self.time.after(moment_s - self.now, what)

    def run(self, until_s: float = float("inf"), max_moments: int = 1_000_000) -> "World":
        """Run until the syncer is finished or the time is over.

        Raises:
            AssertionError: neither came within `max_moments` moments.
        """
        for _ in range(max_moments):
            if self.finished is not None or not self.time.step(until_s):
                return self
        raise AssertionError(f"the world does not come to an end{self.story()}")

    def story(self, last: int = 60) -> str:
        """The end of the tape, for a failing assertion."""
        return self.tape.story(last)

    # ---- links ---------------------------------------------------------------------------------------

    def connect(self, island: PretendIsland) -> int:
        """A new connection; the syncer hears of it after the latency."""
        connection = next(self._connections)
        self._islands[connection] = island
        self._deliver(connection, "up", lambda: self.take(ev.Connected(connection=connection)))
        return connection

    def disconnected(self, connection: int) -> None:
        """A connection is closed at both ends at once; what is on its way is lost."""
        del self._islands[connection]
        self.take(ev.Disconnected(connection=connection, reason="closed"))

    def say(self, island: PretendIsland, message: msg.LearnerMessage) -> None:
        """From an island to the syncer."""
        connection = island.connection
        if connection is not None:
            event = ev.MessageArrived(connection=connection, message=message)
            self._deliver(connection, "up", lambda: self.take(event))

    def _send(self, action: act.Send) -> None:
        island = self._islands.get(action.connection)
        if island is not None:
            event = ev.Received(message=action.message)
            self._deliver(action.connection, "down", lambda: island.feed(event))

    def _deliver(self, connection: int, direction: str, what: What) -> None:
        """First in, first out, unless the connection closes before it arrives."""

        def arrive() -> None:
            if connection in self._islands:
                what()

        line = (connection, direction)
        self._last_s[line] = max(self.now + self.latency_s, self._last_s.get(line, 0.0))
        self.time.after(self._last_s[line] - self.now, arrive)

    def keep(self, name: str, data: bytes) -> None:
        """An upload is complete."""
        self.objects[name] = self.uploads[name] = data

    # ---- the syncer ----------------------------------------------------------------------------------

    def take(self, event: ev.SyncerEvent) -> None:
        """Let the syncer take an event, and perform what it asks for."""
        if self.finished is not None:
            return
        if isinstance(event, ev.MessageArrived):
            event = self._inspected(event)
        actions = self.syncer.handle(event, self.now)
        self.tape.write(self.now, "syncer", event, actions)
        self.syncer.validate()
        for action in actions:
            self._perform(action)

    def _inspected(self, event: ev.MessageArrived) -> ev.MessageArrived:
        """What a driver finds in the objects that a message speaks of."""
        member, message = self.syncer.membership.of(event.connection), event.message
        if member is None:
            return event
        if isinstance(message, msg.Contribute):
            name = objects.contribution(member.name, member.incarnation, message.fragment, message.round)
            payload = self.objects.pop(name, None)
            if payload is None:
                return msgspec.structs.replace(event, problem="missing: no such object")
            received = self.hub.receive(name, message.fragment, payload)
            return msgspec.structs.replace(event, finite=received.finite, norm=received.norm)
        if isinstance(message, msg.Seeded) and member.state == "seeding":
            names = [objects.seed(member.name, member.incarnation, p) for p in self._fragments]
            if any(name not in self.objects for name in names):
                return msgspec.structs.replace(event, problem="missing: no such object")
            found = [self.hub.seed(p, self.objects.pop(name)) for p, name in enumerate(names)]
            digests = [self.hub.digest(p, 0) for p in self._fragments]
            return msgspec.structs.replace(event, finite=all(f.finite for f in found), digests=digests)
        return event

    @property
    def _fragments(self) -> range:
        return range(self.plan.num_fragments)

    def _perform(self, action: act.SyncerAction) -> None:
        match action:
            case act.Send():
                self._send(action)
            case act.HangUp():
                self._hang_up(action.connection)
            case act.SetTimer():
                self._timers.set(action)
            case act.Merge():
                self.time.after(MERGE_S, lambda: self._merge(action))
            case act.Discard():
                self.hub.discard(action.object)
            case act.Retire():
                self.hub.retire(action.fragment, action.version)
            case act.DiscardState():
                self.objects.pop(objects.state(action.transfer), None)
            case act.WriteCheckpoint():
                self.time.after(0.0, lambda: self.take(ev.CheckpointWritten()))
            case act.Finished():
                self.finished = action.reason
            case act.Note() | act.CommitSeed():
                pass

    def _hang_up(self, connection: int) -> None:
        """Close a connection once what was sent on it has arrived."""
        island = self._islands.get(connection)
        if island is not None:
            self._deliver(connection, "down", island.cut)

    def _merge(self, action: act.Merge) -> None:
        merged = self.hub.merge(action)
        self.take(
            ev.MergeDone(
                fragment=action.fragment, version=merged.version, finite=merged.finite,
                norm=merged.norm, digest=merged.digest, merge_s=MERGE_S,
            )
        )  # fmt: skip
