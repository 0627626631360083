"""What must hold of a gossip world at every event, tensors included. Each invariant has a name."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farflung.lab.island import VirtualIsland
from farflung.methods import Method
from farflung.methods.base import Local
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.protocol import objects
from farflung.protocol.gathering import Gathering
from farflung.protocol.learner import LearnerMachine
from farflung.protocol.syncer import SyncerMachine
from farflung.testing.stubs import Broken

if TYPE_CHECKING:
    from farflung.testing.world import World

SLACK_S = 0.5  # of every bound, for messages and transfers
ROUNDING = 2e-5  # of fp32 sums of numbers about 1, over a short run
PATIENCE = 8  # rounds, with all their deadlines, within which somebody meets somebody

Key = tuple[int, int, str, str]
"""Epoch, round and the pair in order: names a meeting."""


@dataclass(frozen=True)
class Ended:
    """The end of one learner's round, as its tensors saw it."""

    node: str
    epoch: int
    round: int
    met: frozenset[str]
    correction: Tensor
    x: Tensor  # after it
    alone: Tensor  # what x were had it trained the same drifts and never met anybody, float64


class GossipChecks:
    """Watches a world.

    Args:
        world: which.

    Attributes:
        ended: the rounds that learners mixed.
        half: meetings that the hub noted as mixed on one side only.
        means: rounds after which the mean of all learners was compared with that of lonely ones.
    """

    def __init__(self, world: World) -> None:
        self.world, self.policy = world, world.method.policy
        self.means = 0
        self.ended: list[Ended] = []
        self.half: set[Key] = set()  # as the hub noted them
        self._taken: dict[str, bytes] = {}  # what a learner offers, by "node.epoch.round"
        self._arrived: set[str] = set()  # objects that lie whole at their receivers
        self._posted: dict[tuple[str, int], tuple[int, list[tuple[str, int]]]] = {}  # (node, round): the mix
        self._adopted: dict[str, deque[tuple[Tensor, Tensor, Tensor]]] = defaultdict(deque)
        self._alone: dict[str, Local] = {}
        self._heard: dict[Key, dict[str, tuple[bool, str]]] = defaultdict(dict)  # learner: met, hub's life
        self._counted: set[tuple[str, int, int]] = set()  # boundary reports that the hub has counted
        self._round: dict[str, int] = {}  # newest, by node
        self._versions = -1
        self._able_s: dict[str, float] = {}  # since when a learner has been able to go on
        self._ended_s: dict[str, float] = {}  # its last round
        self._slowest: dict[str, float] = {}
        self._met_s = 0.0
        self._together_s: float | None = None  # since when all members of the epoch have been able
        self._looked_s = 0.0

    # ---- tensors -------------------------------------------------------------------------------------

    def method(self, island: VirtualIsland) -> Method:
        """The world's method, with an eye on what an island's rounds do to its parameters."""
        self._adopted[island.node].clear()
        method = self.world.method
        dense = None if method.dense is None else self._watched(method.dense, island.node)
        return replace(self._watched(method, island.node), dense=dense)

    def _watched(self, method: Method, node: str) -> Method:

        def adopt(local: Local, correction: Tensor, included: bool) -> Local:
            drift = (local.x - local.base).double()
            alone = self._alone.setdefault(node, _doubled(local))
            alone = method.adopt(
                replace(alone, x=alone.base + drift), torch.zeros_like(correction, dtype=torch.float64), False
            )
            self._alone[node] = replace(alone, x=alone.base)
            after = method.adopt(local, correction, included)
            self._adopted[node].append((correction.clone(), after.x.clone(), alone.base.clone()))
            return after

        return replace(method, adopt=adopt)

    # ---- events --------------------------------------------------------------------------------------

    def saw(self, node: str, machine: Any, event: Any, actions: Sequence[Any]) -> None:
        """A machine took an event (a `MemoryTape`'s watch)."""
        if isinstance(machine, SyncerMachine):
            self._syncer(node, machine, event, actions)
        else:
            self._learner(node, machine, event, actions)

    def _syncer(self, node: str, machine: SyncerMachine, event: Any, actions: Sequence[Any]) -> None:
        if isinstance(event, ev.MessageArrived) and isinstance(event.message, msg.Boundary):
            self._boundary(node, machine, event.connection, event.message)
        elif isinstance(event, ev.MergeDone):
            if event.version != max(self._versions, 0) + 1:
                raise Broken("versions do not grow by one", f"{self._versions} to {event.version}")
            self._versions = event.version
        for action in actions:
            if isinstance(action, act.Note) and action.kind == "half_exchange":
                data = action.data
                self.half.add((data["epoch"], data["round"], *data["learners"]))

    def _boundary(self, node: str, machine: SyncerMachine, connection: int, boundary: msg.Boundary) -> None:
        member = machine.membership.of(connection)
        mixed = boundary.mixed
        if member is None or mixed is None or member.sequence != boundary.sequence:
            return
        report = (member.name, member.incarnation, boundary.sequence)
        if report in self._counted:
            return
        self._counted.add(report)
        left = machine.ledger.windows[member.name][0].in_flight
        if left and machine.phase == "training":
            raise Broken("work is not merged at the mix", f"{member.name} round {mixed.round}: {left} tokens")
        for meeting in mixed.meetings:
            key = _key(mixed.epoch, mixed.round, member.name, meeting.partner)
            self._heard[key][member.name] = (not meeting.missed, node)

    def _learner(self, node: str, machine: LearnerMachine, event: Any, actions: Sequence[Any]) -> None:
        peer, name = machine.peer, machine.learner
        island = self.world.island(name)
        if isinstance(event, ev.Arrived):
            self._arrived.add(event.object)
        elif isinstance(event, ev.Reported) and isinstance(event.report, box.BoundaryPassed):
            for taken in event.report.taken:
                self._taken[f"{node}.{taken.round}"] = island.trainer.read(0, seed=False)[: taken.num_bytes]
            if event.report.mixed is not None:
                self._mixed(island, node, machine, event.report.mixed)
        for action in actions:
            if isinstance(action, act.Post) and isinstance(action.command, box.Mix):
                self._post(node, machine, action.command)
        meeting = peer.meeting
        if meeting is None:
            return
        if meeting.round < self._round.get(node, -1):
            raise Broken("rounds do not grow", f"{node}: {self._round[node]} to {meeting.round}")
        self._round[node] = meeting.round
        if meeting.until_s is not None and meeting.waits_since_s is not None:
            longest_s = self.policy.exchange_s or self.policy.lease_s
            if meeting.until_s - meeting.waits_since_s > longest_s + 1e-6:
                raise Broken("a wait has no deadline", f"{node} round {meeting.round}: {meeting.until_s}")

    def _post(self, node: str, machine: LearnerMachine, mix: box.Mix) -> None:
        """A learner says with whom a round is mixed: all of them have its vector, and it has theirs."""
        meeting = machine.peer.meeting
        assert meeting is not None
        met = [(name, p.slot) for name, p in meeting.partners.items() if p.met]
        for name, _ in met:
            for ends in ((machine.learner, name), (name, machine.learner)):
                if objects.offer(meeting.epoch, mix.round, *ends) not in self._arrived:
                    raise Broken("mixed without an acknowledgement", f"{node} round {mix.round}: {ends}")
        self._posted[node, mix.round] = (meeting.epoch, met)

    def _mixed(self, island: VirtualIsland, node: str, machine: LearnerMachine, mixed: box.Mixed) -> None:
        """A round was mixed, just now: with whose vectors, and what it did."""
        correction, x, alone = self._adopted[node].popleft()
        epoch, posted = self._posted.pop((node, mixed.round))
        for name, slot in posted:
            self._right_vector(island, name, mixed.round, slot)
        finite = zip(posted, mixed.distances, strict=True)
        met = frozenset(name for (name, _), distance in finite if distance is not None)
        self.ended.append(Ended(node, epoch, mixed.round, met, correction, x, alone))
        self._ended_s[island.name] = self.world.now
        if met:
            self._met_s = self.world.now
        told = machine.unacked[-1].mixed if machine.unacked else None
        if told is not None and told.round == mixed.round:
            said = {m.partner for m in told.meetings if not m.missed}
            if said != met:
                raise Broken("a report is not what was mixed", f"{node} round {mixed.round}: {said}, {met}")

    def _right_vector(self, island: VirtualIsland, partner: str, round: int, slot: int) -> None:
        """What lies in the slot is what the partner offered in this round."""
        assert island.body is not None
        given = bytes(island.body.downlink(slot).numpy())  # type: ignore[attr-defined]
        nodes = [key for key in self._taken if key.partition(".")[0] == partner]
        offered = [self._taken[key] for key in nodes if key.rpartition(".")[2] == str(round)]
        if not any(given[: len(vector)] == vector for vector in offered):
            raise Broken("a vector of another round is mixed", f"{island.node} round {round} from {partner}")

    # ---- time ----------------------------------------------------------------------------------------

    def moment(self) -> None:
        """A moment of virtual time is over."""
        now = self.world.now
        for island in self.world.islands:
            meeting = island.machine.peer.meeting if island.alive and not island.frozen else None
            if meeting is None or meeting.until_s is None or meeting.mixing:
                continue
            if island.timers.now > meeting.until_s + 1e-6:
                raise Broken("a wait passed its deadline", f"{island.node} round {meeting.round}")
        if now - self._looked_s >= self.policy.lease_s / 10:
            self._looked_s = now
            self._progress()

    def _progress(self) -> None:
        """Who can go on ends its rounds, whatever has become of others; and some of them meet."""
        world, now = self.world, self.world.now
        for island in world.islands:
            self._slowest[island.name] = max(island.slowdown, self._slowest.get(island.name, 1.0))
            if not self._able(island):
                self._able_s.pop(island.name, None)
                continue
            since_s = max(self._able_s.setdefault(island.name, now), self._ended_s.get(island.name, 0.0))
            if now - since_s > self._bound_s(island):
                raise Broken("no progress", f"{island.name} has ended no round since {since_s:.2f} s")
        gathering = world.syncer.merging
        assert isinstance(gathering, Gathering)
        members = gathering.members
        together = world.syncer_up and world.syncer.phase == "training" and len(members) > 1
        if not together or any(name not in self._able_s for name in members):
            self._together_s = None
            return
        if self._together_s is None:
            self._together_s = now
        longest_s = PATIENCE * max(self._bound_s(world.island(name)) for name in members)
        if now - max(self._together_s, self._met_s) > longest_s:
            raise Broken("no progress", f"nobody has met anybody since {self._met_s:.2f} s")

    def _able(self, island: VirtualIsland) -> bool:
        if not island.alive or island.frozen or island.trouble.dead(self.world.now):
            return False
        machine = island.machine
        return machine.phase == "training" and machine.peer.epoch is not None

    def _bound_s(self, island: VirtualIsland) -> float:
        steps_s = self.policy.steps_of(island.name) * self.world.step_s(island) * self._slowest[island.name]
        return steps_s + (self.policy.exchange_s or self.policy.lease_s) + SLACK_S

    # ---- the end -------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The world has ended in order."""
        self._count_halves()
        rounds: dict[tuple[int, int], dict[str, Ended]] = defaultdict(dict)
        for end in self.ended:
            rounds[end.epoch, end.round][end.node.partition(".")[0]] = end
        for (epoch, round), ends in rounds.items():
            self._sum_is_zero(f"epoch {epoch} round {round}", ends)
        self._mean_moves_like_drifts()
        if alarms := self.world.tape.notes("alarm"):
            raise Broken("an alarm", f"{alarms}")
        for proof in self.world.tape.notes("rejoin_proved"):
            if not all(equal for name, equal in proof.items() if name.endswith("_equal")):
                raise Broken("a rejoin is not proven", f"{proof}")
        if self.world.finished == "finished" and (left := self.world.syncer.ledger.in_flight):
            raise Broken("a token has no fate", f"{left} in flight after the end")

    def _count_halves(self) -> None:
        """A meeting of which the hub heard both sides is mixed on both, on none, or counted as half."""
        seen = {
            key
            for key, sides in self._heard.items()
            if len({met for met, _ in sides.values()}) == 2 and len({life for _, life in sides.values()}) == 1
        }
        if seen - self.half:
            raise Broken("a half exchange is not counted", f"{sorted(seen - self.half)}")
        if wrong := [key for key in self.half if len({met for met, _ in self._heard[key].values()}) != 2]:
            raise Broken("a half exchange that was none", f"{sorted(wrong)}")

    def _sum_is_zero(self, where: str, ends: dict[str, Ended]) -> None:
        """The corrections of those who mixed with each other cancel, unless one side is missing."""
        left = set(ends)
        while left:
            group, edge = set(), {left.pop()}
            while edge:
                name = edge.pop()
                group.add(name)
                edge |= {p for p in (ends[name].met if name in ends else ()) if p not in group}
            left -= group
            if any(name not in ends or any(name not in ends[p].met for p in ends[name].met if p in ends)
                   for name in group):  # fmt: skip
                continue
            total = torch.stack([ends[name].correction for name in sorted(group)]).double().sum(0)
            if not float(total.abs().max()) < ROUNDING * (1 + max(map(_size, ends.values()))):
                raise Broken("corrections do not sum to zero", f"{where}: {sorted(group)}: {total}")

    def _mean_moves_like_drifts(self) -> None:
        """In a world without births and deaths after the first round the mean is that of lonely learners."""
        by_node: dict[str, list[Ended]] = defaultdict(list)
        for end in self.ended:
            by_node[end.node].append(end)
        whole = len(by_node) == len(self.world.islands) and not self.half
        if not whole or {e.epoch for e in self.ended} != {1}:
            return
        for number in range(min(map(len, by_node.values()))):
            ends = [by_node[node][number] for node in sorted(by_node)]
            if any(e.round != number for e in ends):
                raise Broken("rounds do not grow by one", f"{[(e.node, e.round) for e in ends]}")
            if any(e.node not in _of(ends, name).met for e in ends for name in e.met):
                return  # half: one side's report never came
            if not all(e.x.isfinite().all() for e in ends):
                return  # poisoned
            together = torch.stack([e.x for e in ends]).double().mean(0)
            moved = float((together - torch.stack([e.alone for e in ends]).mean(0)).abs().max())
            if not moved < ROUNDING * (1 + max(map(_size, ends))):
                raise Broken("the mean moved", f"in round {number} by {moved}")
            self.means += 1


def _key(epoch: int, round: int, one: str, other: str) -> Key:
    return (epoch, round, min(one, other), max(one, other))


def _of(ends: list[Ended], name: str) -> Ended:
    return next(e for e in ends if e.node == name)


def _size(end: Ended) -> float:
    return float(torch.cat([end.x, end.correction]).nan_to_num(0.0).abs().max())


def _doubled(local: Local) -> Local:
    """Where a learner's first round begins."""
    base = local.base.double()
    return Local(x=base, base=base, state={name: values.double() for name, values in local.state.items()})
