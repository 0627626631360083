"""Machines, hub and islands over simulated links under virtual time: a whole run without a socket.

Everything that decides and everything that touches tensors is the product's own; only links, clocks and
processes are pretended. A run is a function of its arguments.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from farflung.core.fragments import FragmentPlan
from farflung.core.traffic import framed_bytes
from farflung.engine.hub import HubState
from farflung.lab.body import Body
from farflung.lab.island import VirtualIsland
from farflung.lab.virtual_time import Timers, VirtualTime, What
from farflung.methods import Method
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import messages as msg
from farflung.protocol import objects, snapshot
from farflung.protocol.byte_table import ByteTable
from farflung.protocol.syncer import SyncerMachine


class Tape(Protocol):
    """Where machines leave what they see and do."""

    def open(self, node: str, machine: Any) -> None:
        """A machine begins."""

    def handle(self, node: str, machine: Any, event: Any, now: float) -> Sequence[Any]:
        """Let a machine take an event; record it and the actions; return them."""


class VirtualRun:
    """A syncer and its islands.

    Args:
        method: the method, with its policy.
        plan: the fragment plan of the model.
        run: the run's id.
        learners: names of the islands.
        budget_tokens: of the whole run.
        tape: what is recorded.
        make_body: a fresh trainer for an island's new process.
        step_s: seconds of an island's next step.
        control_s: seconds of a control message, one way, of an island.
        transfer_s: (island, "up" or "down", bytes) -> seconds until an object that is ready now has arrived.
        merge_s: seconds of a merge.
        pair_s: gossip: (object, from, to, bytes) -> seconds of an object from one island straight to another.
        release: gossip: (object, from, to): such an object is no longer on its way.
        mbps: gossip: what an island's link is declared to carry.
        starts_s: name -> when an island's first process knocks.
    """

    def __init__(
        self,
        method: Method,
        plan: FragmentPlan,
        *,
        run: str,
        learners: Sequence[str],
        budget_tokens: int,
        tape: Tape,
        make_body: Callable[[VirtualIsland], Body],
        step_s: Callable[[VirtualIsland], float],
        control_s: Callable[[VirtualIsland], float],
        transfer_s: Callable[[VirtualIsland, str, int], float],
        merge_s: float,
        pair_s: Callable[[str, VirtualIsland, VirtualIsland, int], float] = lambda name, a, b, num_bytes: 0.0,
        release: Callable[[str, VirtualIsland, VirtualIsland], None] = lambda name, a, b: None,
        mbps: Callable[[VirtualIsland], float | None] = lambda island: None,
        starts_s: Callable[[str], float] = lambda name: 0.0,
    ):
        self.method, self.plan, self.tape, self.merge_s = method, plan, tape, merge_s
        self.make_body, self.step_s = make_body, step_s
        self.control_s, self.transfer_s = control_s, transfer_s
        self.pair_s, self.release, self.mbps = pair_s, release, mbps
        self.time = VirtualTime()
        self.hub = HubState(plan, method)
        self._run_id, self._num_learners, self._budget_tokens = run, len(learners), budget_tokens
        self.syncer = self._new_syncer()
        self.syncer_lives = 1
        self.syncer_up = True
        self.exited: Callable[[VirtualIsland, bool], None] = lambda island, ok: (
            None
        )  # told of a process's end
        self.objects: dict[str, bytes] = {}  # uploaded and not yet taken, by name
        self.uploads: dict[str, bytes] | None = None  # all that was ever uploaded, when somebody asks for it
        self.bytes = ByteTable()
        self.hidden: set[str] = set()  # gossip: islands that nobody can dial
        self.walls: set[frozenset[str]] = set()  # gossip: pairs of islands that cannot dial each other
        self.finished: str | None = None
        self._timers = Timers(
            self.time, lambda name, late_s: self.take(ev.TimerFired(name=name, late_s=late_s))
        )
        self._connections = itertools.count(1)
        self._islands: dict[int, VirtualIsland] = {}  # by connection
        self._last_s: dict[tuple[int, str], float] = {}  # (connection, direction): its newest arrival
        tape.open("syncer", self.syncer)
        self.islands = [VirtualIsland(name, self) for name in learners]
        for island in self.islands:
            self.time.after(starts_s(island.name), island.start)

    @property
    def now(self) -> float:
        return self.time.now

    def at(self, moment_s: float, what: What) -> None:
        """Let something happen, a fault for instance."""
        self.time.after(moment_s - self.now, what)

    def island(self, name: str) -> VirtualIsland:
        return next(i for i in self.islands if i.name == name)

    # ---- what may befall the syncer ------------------------------------------------------------------

    def _new_syncer(self) -> SyncerMachine:
        return SyncerMachine(
            self.method.policy, run=self._run_id, num_learners=self._num_learners,
            budget_tokens=self._budget_tokens,
        )  # fmt: skip

    def jump(self, by_s: float) -> None:
        """The clock that drives the syncer leaps ahead."""
        self._timers.jump(by_s)

    def lose_syncer(self) -> None:
        """The syncer's process is gone, and with it whatever lay in open rounds or was being merged."""
        self._given = snapshot.encode(snapshot.snapshot(self.syncer))
        self.syncer_up = False
        self._timers.cancel_all()
        for round in self.syncer.merging.rounds.open.values():
            for arrived in round.arrived.values():
                self.hub.discard(arrived.object)
        self.objects.clear()
        for island in [*self._islands.values()]:
            island.cut()

    def restart_syncer(self) -> None:
        """A fresh machine goes on from the state that the lost one had; learners reattach to it."""
        saved = snapshot.decode(self._given)
        for member in saved.members:
            if member.state == "training":
                member.state = "saved"  # expected to reattach
        self.syncer, self.syncer_up = self._new_syncer(), True
        self.syncer_lives += 1
        snapshot.restore(self.syncer, saved, self._timers.now)
        self.tape.open(self.node, self.syncer)

    @property
    def node(self) -> str:
        """The syncer's name on the tape."""
        return "syncer" if self.syncer_lives == 1 else f"syncer.{self.syncer_lives}"

    # ---- links ---------------------------------------------------------------------------------------

    def reachable(self, island: VirtualIsland) -> bool:
        """Whether the syncer would answer this island."""
        return self.syncer_up and not island.trouble.dead(self.now)

    def bulk_s(self, island: VirtualIsland, direction: str, num_bytes: int) -> float:
        """Seconds until an object that is ready now has arrived, trouble included."""
        usual_s = self.transfer_s(island, direction, num_bytes)
        return island.trouble.bulk_s(direction, num_bytes, usual_s, self.now)

    def pair_bulk_s(self, name: str, sender: VirtualIsland, receiver: VirtualIsland, num_bytes: int) -> float:
        """Seconds until an object has arrived that goes straight to a partner, trouble at both ends included."""
        usual_s = self.pair_s(name, sender, receiver, num_bytes)
        up_s = sender.trouble.bulk_s("up", num_bytes, usual_s, self.now)
        return max(up_s, receiver.trouble.bulk_s("down", num_bytes, usual_s, self.now))

    def connect(self, island: VirtualIsland) -> int:
        """A new connection; the syncer hears of it after the latency."""
        connection = next(self._connections)
        self._islands[connection] = island
        self._deliver(connection, "up", lambda: self.take(ev.Connected(connection=connection)))
        return connection

    def disconnected(self, connection: int) -> None:
        """A connection is closed at both ends at once; what is on its way is lost."""
        del self._islands[connection]
        self.take(ev.Disconnected(connection=connection, reason="closed"))

    def say(self, island: VirtualIsland, message: msg.LearnerMessage) -> None:
        """From an island to the syncer."""
        connection = island.connection
        if connection is not None:
            event = ev.MessageArrived(connection=connection, message=message)
            self._deliver(connection, "up", lambda: self.take(event))
            if isinstance(message, msg.Contribute) and island.trouble.repeats():
                self._repeat(island, event, message)

    def _repeat(self, island: VirtualIsland, event: ev.MessageArrived, message: msg.Contribute) -> None:
        """A retry: the bytes and the message once more."""
        incarnation = island.machine.incarnation
        assert incarnation is not None
        name = objects.contribution(island.name, incarnation, message.fragment, message.round)
        data = self.objects.get(name)

        def arrive() -> None:
            if data is not None:
                self.keep(name, data)
            self.take(event)

        self._deliver(event.connection, "up", arrive)

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
        island = self._islands[connection]
        delay_s = self.control_s(island) + island.trouble.extra_s(self.now)
        sent_s = island.trouble.sent_s(direction, self.now)
        self._last_s[line] = max(sent_s + delay_s, self._last_s.get(line, 0.0))
        self.time.after(self._last_s[line] - self.now, arrive)

    def keep(self, name: str, data: bytes) -> None:
        """An upload is complete."""
        self.objects[name] = data
        if self.uploads is not None:
            self.uploads[name] = data

    @property
    def bytes_moved(self) -> dict[str, int]:
        """Up and down, of all islands."""
        return {"up": self.bytes.bytes_up, "down": self.bytes.bytes_down}

    def count(self, island: VirtualIsland, direction: str, object_name: str, num_bytes: int) -> None:
        """An object passed an island's link, with the frame headers that it would have."""
        self.bytes.count(island.name, object_name, **{direction: framed_bytes(num_bytes)})

    # ---- the syncer ----------------------------------------------------------------------------------

    def take(self, event: ev.SyncerEvent) -> None:
        """Let the syncer take an event, and perform what it asks for."""
        if self.finished is not None or not self.syncer_up:
            return
        if isinstance(event, ev.MessageArrived):
            event = self._inspected(event)
        for action in self.tape.handle(self.node, self.syncer, event, self._timers.now):
            self._perform(action)

    def _inspected(self, event: ev.MessageArrived) -> ev.MessageArrived:
        """What a driver finds in the objects that a message speaks of."""
        member, message = self.syncer.membership.of(event.connection), event.message
        if member is None:
            return event
        if isinstance(message, msg.Contribute):
            name = objects.contribution(member.name, member.incarnation, message.fragment, message.round)
            payload = self.objects.pop(name, None)
            if self.syncer.merging.has(member, message.fragment, message.round):
                return event  # a repeat: it must not take the place of what is merged, or waits to be
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
                work, life = self.hub.begin(action), self.syncer_lives
                self.time.after(self.merge_s, lambda: self._merged(life, action, work))
            case act.Discard():
                self.hub.discard(action.object)
                self.objects.pop(action.object, None)  # relayed
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

    def _merged(self, life: int, action: act.Merge, work: Callable[[], Any]) -> None:
        if life != self.syncer_lives or not self.syncer_up:
            return  # its syncer is gone
        merged = work()
        self.take(
            ev.MergeDone(
                fragment=action.fragment, version=merged.version, finite=merged.finite,
                norm=merged.norm, digest=merged.digest, merge_s=self.merge_s,
            )
        )  # fmt: skip
