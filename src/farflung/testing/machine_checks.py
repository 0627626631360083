"""What must hold of a world of machines at every event. Each invariant has a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farflung.protocol import actions as act
from farflung.protocol import messages as msg
from farflung.protocol.exchange import Exchange
from farflung.testing.stubs import Broken, Payload

if TYPE_CHECKING:
    from farflung.testing.machine_process import Process
    from farflung.testing.machine_world import MachineWorld

BOOKS_EVERY = 8  # events between two audits of the ledger; every event when a story is shrunk


class Checks:
    """Watches a world.

    Args:
        world: which.
    """

    def __init__(self, world: MachineWorld) -> None:
        self.world, self.policy = world, world.policy
        self.books_every = BOOKS_EVERY
        self.open: dict[
            int, frozenset[tuple[str, int]]
        ] = {}  # fragment: members that were live when its round opened
        self.final: set[int] = set()  # fragments whose open round is a hand-in
        self.merging: set[int] = set()
        self.versions = [-1] * world.policy.num_fragments
        self.held: dict[tuple[str, int, int], int] = {}  # by (learner, life, fragment)
        self.saved: Any = None

    # ---- the syncer's actions ------------------------------------------------------------------------

    def note(self, action: act.Note) -> None:
        kind, data = action.kind, action.data
        if kind == "round_open":
            p = data["fragment"]
            if p in self.open:
                raise Broken("two rounds of one fragment", f"fragment {p}")
            self.open[p] = self._live()
            if data["final"]:
                self.final.add(p)
        elif kind == "ending":
            self.open = {p: names for p, names in self.open.items() if p in self.merging}
        elif kind == "alarm" and data["what"] == "install_mismatch":
            raise Broken("a joiner holds wrong bits", data["detail"])

    def _live(self) -> frozenset[tuple[str, int]]:
        world = self.world
        return frozenset(
            (m.name, m.incarnation)
            for m in world.syncer.membership.members.values()
            if m.state == "training" and world.now <= m.lease_until_s
        )

    def merge(self, action: act.Merge) -> None:
        p, learners = action.fragment, {part.learner for part in action.parts}
        if p not in self.open:
            raise Broken("a merge without a round", f"{action}")
        if p in self.merging:
            raise Broken("two merges of one fragment", f"{action}")
        self.merging.add(p)
        if len(learners) < len(action.parts):
            raise Broken("a contribution is merged twice", f"{action}")
        if p not in self.final and len(learners) < (needed := self._needed(p)):
            raise Broken("a merge below quorum", f"{len(learners)} of {needed}: {action}")

    def _needed(self, p: int) -> int:
        if isinstance(self.policy.quorum, int):
            return self.policy.quorum
        members, now = self.world.syncer.membership.members, self.world.now
        there = [m for n, i in self.open[p] if (m := members[n]).incarnation == i and m.live(now)]
        return max(1, len(there))

    def retire(self, action: act.Retire) -> None:
        kept = self.world.hub.kept[action.fragment]
        kept.pop(action.version, None)
        if self.world.hub.versions[action.fragment] not in kept:
            raise Broken("the newest version is retired", f"{action}")

    def contribute(self, message: msg.Contribute, payload: Payload) -> None:
        told = (message.fragment, message.round, message.tokens)
        if told != (payload.fragment, payload.round, payload.tokens):
            raise Broken("an object is not what its message says", f"{message}: {payload}")

    def merge_done(self, p: int) -> None:
        del self.open[p]
        self.final.discard(p)
        self.merging.discard(p)
        version = self.world.syncer.merging.versions[p]
        if version != max(self.versions[p], 0) + 1 or version != self.world.hub.versions[p]:
            raise Broken("versions do not grow by one", f"fragment {p}: {self.versions[p]} to {version}")
        self.versions[p] = version
        merged = self.world.syncer.ledger.merged
        if merged != self.world.hub.merged_tokens:
            detail = f"the ledger merged {merged}, the hub {self.world.hub.merged_tokens}"
            raise Broken("a token has no fate", detail)

    def after_syncer(self, actions: list[Any]) -> None:
        world = self.world
        syncer = world.syncer
        merging = syncer.merging
        for p, round in merging.rounds.open.items():
            if round.merging:
                if p not in self.merging:
                    raise Broken("a wait has no deadline", f"fragment {p} merges, but no merge was asked for")
            elif not round.final and syncer.phase == "training" and f"round.{p}" not in world.timers:
                raise Broken("a wait has no deadline", f"round {round.number} of fragment {p}")
        if world.finished is None:
            self._deadlines(syncer)
        for action in actions:
            if type(action) is act.Send and type(action.message) is msg.Donate:
                self._donor(action.message.transfer)
        if world.events % self.books_every == 0:
            self.audit()

    def _deadlines(self, syncer: Any) -> None:
        phase, timers = syncer.phase, self.world.timers
        ending = phase in ("handing_in", "suspending") and not self.merging
        if ending and "end" not in timers:
            raise Broken("a wait has no deadline", f"the syncer is {phase}")
        if "lease" not in timers and syncer.membership.connections:
            raise Broken("a wait has no deadline", "no lease is watched")
        for transfer, (joiner, _) in syncer.admission.transfers.items():
            if syncer.membership.members[joiner].offer is None and f"donor.{transfer}" not in timers:
                raise Broken("a wait has no deadline", f"donor of {transfer}")

    def _donor(self, transfer: str) -> None:
        """The machine names joiner and donor; the hub knows whose work was merged."""
        world = self.world
        joiner, _, donor_name = transfer.split(".")
        donor = world.syncer.membership.members[donor_name]
        if (donor_name, donor.incarnation) not in world.hub.lineage or donor_name == joiner:
            raise Broken("a donor has no lineage", transfer)
        behind = [v - h for v, h in zip(world.hub.versions, donor.held, strict=True)]
        if max(behind) > 1:
            raise Broken("a donor has no lineage", f"{transfer}: {behind} versions behind")

    def audit(self) -> None:
        """The ledger adds up, and the machine's own invariants hold."""
        try:
            self.world.syncer.ledger.validate()
        except AssertionError as error:
            raise Broken("a token has no fate", str(error)) from None
        try:
            self.world.syncer.merging.validate()
        except AssertionError as error:
            raise Broken("the syncer is not valid", str(error)) from None

    # ---- restart -------------------------------------------------------------------------------------

    def restored(self) -> None:
        """What was acknowledged as durable is there again."""
        syncer, hub = self.world.syncer, self.world.hub
        if syncer.merging.versions != hub.versions:
            detail = f"{syncer.merging.versions}, durable: {hub.versions}"
            raise Broken("a restored syncer goes back", detail)
        if syncer.ledger.merged != hub.merged_tokens:
            raise Broken("a restored syncer goes back", f"merged {syncer.ledger.merged}")
        self.open.clear()
        self.final.clear()
        self.merging.clear()
        self.audit()

    # ---- learners ------------------------------------------------------------------------------------

    def after_learner(self, process: Process) -> None:
        machine = process.machine
        if machine.phase != "training":
            return
        exchange = machine.exchange
        assert isinstance(exchange, Exchange)
        limit = exchange.limit
        if exchange.last is None and limit.step is not None and machine.step >= limit.step:
            if "wait" not in process.timers:
                raise Broken("a wait has no deadline", f"{process.name} stands at step {machine.step}")
            if not limit.reason:
                raise Broken("a wait has no reason", process.name)
        life = process.trainer.life
        for p, line in enumerate(exchange.lines):
            if line.held > self.world.hub.versions[p]:
                raise Broken("a learner holds a version that is not there", f"{process.name}: {p}")
            if line.held > line.newest or (line.fetching is not None and line.posted is not None):
                raise Broken("the learner is not valid", f"{process.name}: fragment {p}: {line}")
            key = (process.name, life, p)
            if line.held < self.held.get(key, -1):
                raise Broken("versions do not grow by one", f"{process.name} went back: {line}")
            self.held[key] = line.held
