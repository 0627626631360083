"""The Syncer machine: owns versions, rounds, members and the ledger; decides, and does no I/O.

`handle(event, now) -> actions`. It never waits for a learner except below quorum. Tensor work is asked for by
`Merge` and answered by `MergeDone`; messages go out by `Send`. Its parts, each an idea of its own: `Admission`
(who may take part, birth and rejoin), `Merging` (rounds, contributions, versions), `Ending` (budget, stop).
"""

from collections.abc import Callable
from typing import Any, Literal

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import messages as msg
from farflung.protocol import objects
from farflung.protocol.actions import SyncerAction
from farflung.protocol.admission import Admission
from farflung.protocol.ending import Ending
from farflung.protocol.gathering import Gathering
from farflung.protocol.ledger import Ledger
from farflung.protocol.membership import Member, Membership
from farflung.protocol.merging import Merging
from farflung.protocol.policy import Policy

Phase = Literal["birth", "training", "finishing", "handing_in", "suspending", "finished", "suspended"]


def malformed(message: msg.LearnerMessage, member: Member, num_fragments: int) -> str | None:
    """One line about numbers that cannot be, or None. Types were checked when the frame was decoded."""
    kind, every = type(message).__name__, range(num_fragments)
    if isinstance(message, msg.Boundary):
        if message.tokens < 0 or not 0 <= message.step_s < float("inf"):
            return f"{kind}: tokens = {message.tokens}, step_s = {message.step_s}"
        if any(p not in every for p, _ in [*message.adopted, *message.snapshots]):
            return f"{kind}: a fragment outside 0..{num_fragments - 1}"
        if any(version > member.announced[p] for p, version in message.adopted):
            return f"{kind}: adopted a version that was never announced"
        mixed = message.mixed
        if mixed is not None and not (
            mixed.round >= 0
            and (mixed.mbps is None or 0 < mixed.mbps < float("inf"))
            and min(mixed.bytes_up, mixed.bytes_down) >= 0
            and len({member.name, *(m.partner for m in mixed.meetings)}) == len(mixed.meetings) + 1
        ):
            return f"{kind}: round {mixed.round}, mbps = {mixed.mbps}, bytes {mixed.bytes_up}, {mixed.bytes_down}"
    if isinstance(message, msg.HandedIn) and min(message.bytes_up, message.bytes_down) < 0:
        return f"{kind}: bytes {message.bytes_up}, {message.bytes_down}"
    if isinstance(message, msg.Contribute) and message.fragment not in every:
        return f"{kind}: fragment {message.fragment} is outside 0..{num_fragments - 1}"
    if (
        isinstance(message, msg.Installed)
        and not len(message.versions) == len(message.digests) == num_fragments
    ):
        return f"{kind}: needs one version and digest for each of {num_fragments} fragments"
    return None


class SyncerMachine:
    """One logical syncer of one run.

    Args:
        policy: the method's data.
        run: id that every message and object must carry.
        num_learners: learners expected; only for figures, more may come and fewer may do.
        budget_tokens: tokens of the whole run after which it ends.
    """

    def __init__(self, policy: Policy, *, run: str, num_learners: int, budget_tokens: int):
        self.policy, self.run = policy, run
        self.num_learners, self.budget_tokens = num_learners, budget_tokens
        self.phase: Phase = "birth"
        self.now = 0.0
        self.membership = Membership(policy.num_fragments)
        self.ledger = Ledger(policy.num_fragments, policy.carries_tokens)
        self.refused: dict[str, int] = {}
        self.restored: dict[str, Any] | None = None  # the snapshot it began from, for the tape
        self.merging = Gathering(self) if policy.topology == "gossip" else Merging(self)
        self.admission = Admission(self)
        self.ending = Ending(self)
        self._out: list[SyncerAction] = []
        self._events: dict[type, Callable[[Any], None]] = {
            ev.TimerFired: self._timer_fired,
            ev.Connected: lambda event: None,
            ev.Disconnected: self._disconnected,
            ev.MessageArrived: self._message_arrived,
            ev.Refusal: lambda event: self.refuse("unknown", event.reason, event.detail, event.count),
            ev.MergeDone: self.merging.merge_done,
            ev.StopRequested: self.ending.stop_requested,
            ev.CheckpointWritten: self.ending.checkpoint_written,
        }
        self._messages: dict[type, Callable[[Member, ev.MessageArrived], None]] = {
            msg.Boundary: self._boundary,
            msg.Contribute: self.merging.contribute,
            msg.Seeded: self.admission.seeded,
            msg.Heartbeat: lambda member, event: None,
            msg.StateReady: self.admission.state_ready,
            msg.StateFailed: self.admission.state_failed,
            msg.Installed: self.admission.installed,
            msg.HandedIn: self.ending.handed_in,
            msg.Saved: self.ending.saved,
            msg.TrainerLost: lambda member, event: self._gone(member, event, "lost"),
            msg.Leave: lambda member, event: self._gone(member, event, "left"),
            msg.Relay: self._relay,
            msg.Relayed: self._relay,
        }

    def header(self) -> dict[str, Any]:
        """What a fresh machine needs, beside the policy, to replay this one's tape."""
        header = {
            "machine": "syncer",
            "run": self.run,
            "num_learners": self.num_learners,
            "budget_tokens": self.budget_tokens,
        }
        return header if self.restored is None else {**header, "restored": self.restored}

    def handle(self, event: ev.SyncerEvent, now: float) -> list[SyncerAction]:
        """Take one event at time `now` (seconds, monotonic); return what to do, in this order."""
        self.now, self._out = now, []
        self._events[type(event)](event)
        return self._out

    def validate(self) -> None:
        """Raise AssertionError on a broken invariant."""
        self.ledger.validate()
        self.merging.validate()

    # ---- speaking ------------------------------------------------------------------------------------

    def emit(self, action: SyncerAction) -> None:
        self._out.append(action)

    def send(self, member: Member, message: msg.SyncerMessage) -> None:
        if member.connection is not None:
            self.emit(act.Send(connection=member.connection, message=message))

    def note(self, kind: str, **data: Any) -> None:
        self.emit(act.Note(kind=kind, data=data))

    def timer(self, name: str, at_s: float | None) -> None:
        self.emit(act.SetTimer(name=name, at_s=at_s))

    def refuse(self, learner: str, reason: str, detail: str, count: int = 1) -> None:
        """Count and show bad input; it changed nothing."""
        self.refused[reason] = self.refused.get(reason, 0) + count
        self.note("refused", learner=learner, reason=reason, detail=detail, count=count)

    # ---- members -------------------------------------------------------------------------------------

    def settle(self, member: Member, fragment: int, round: int, fate: msg.Fate, reason: str = "") -> None:
        """Enter a contribution's fate in the ledger and tell its learner."""
        self.ledger.settled(member.name, fragment, round, fate)
        self.send(member, msg.FateOf(fragment=fragment, round=round, fate=fate, reason=reason))

    def lose(self, member: Member, reason: str, kind: str = "lost") -> None:
        """The member's process is gone for good; what it had handed over still counts."""
        if member.state == "gone":
            return
        member.state = "gone"
        self.ledger.lost(member.name, self.merging.holding(member.name))
        self.note(kind, learner=member.name, incarnation=member.incarnation, reason=reason)
        self.admission.member_lost(member)
        self.merging.review_all()
        self.ending.review()

    def _gone(self, member: Member, event: ev.MessageArrived, kind: str) -> None:
        assert isinstance(event.message, (msg.TrainerLost, msg.Leave))
        self.lose(member, event.message.reason, kind)

    # ---- events --------------------------------------------------------------------------------------

    def _timer_fired(self, event: ev.TimerFired) -> None:
        if event.late_s > 0:  # our own lateness is nobody's silence
            for member in self.membership.present():
                member.lease_until_s += event.late_s
        kind, _, rest = event.name.partition(".")
        if kind == "open":
            self.merging.open_due()
        elif kind == "round":
            self.merging.review(int(rest))
        elif kind == "lease":
            self._check_leases()
        elif kind == "donor":
            self.admission.donor_late(rest)
        elif kind == "end":
            self.ending.overdue()

    def _check_leases(self) -> None:
        """Who is silent too long counts no more; the name may come back, by reattaching or anew."""
        for member in self.membership.present():
            lapsed = not member.live(self.now)
            if lapsed != member.lapsed:
                member.lapsed = lapsed
                self.note("lease_lapsed" if lapsed else "lease_renewed", learner=member.name)
        self.merging.review_all()
        self.admission.review()
        self.ending.review()
        self.timer("lease", self.now + self.policy.heartbeat_s)

    def _disconnected(self, event: ev.Disconnected) -> None:
        member = self.membership.of(event.connection)
        if member is not None:
            self.note("disconnected", learner=member.name, reason=event.reason)
        self.membership.unbind(event.connection)
        if member is not None:
            self.admission.unlinked(member)

    def _message_arrived(self, event: ev.MessageArrived) -> None:
        if isinstance(event.message, msg.Join):
            self.admission.join(event.connection, event.message)
            return
        member = self.membership.of(event.connection)
        if member is None:
            self.refuse("unknown", "not_joined", f"{type(event.message).__name__} before Join")
            self.emit(act.HangUp(connection=event.connection))
            return
        member.lease_until_s = self.now + self.policy.lease_s
        problem = malformed(event.message, member, self.policy.num_fragments)
        if problem is not None:
            self.refuse(member.name, "malformed", problem)
            self.emit(act.HangUp(connection=event.connection))
            return
        self._messages[type(event.message)](member, event)

    def _relay(self, member: Member, event: ev.MessageArrived) -> None:
        message, gathering = event.message, self.merging
        assert isinstance(message, msg.Relay | msg.Relayed)
        ends = (
            (member.name, message.partner)
            if isinstance(message, msg.Relay)
            else (message.partner, member.name)
        )
        offer = objects.parse_offer(message.object)
        if not isinstance(gathering, Gathering):
            self.refuse(member.name, "malformed", "a relay in a run without partners")
        elif offer is None or offer[2:] != ends:
            detail = f"{type(message).__name__}: not an offer from {ends[0]} to {ends[1]}"
            self.refuse(member.name, "malformed", detail)
        elif isinstance(message, msg.Relay):
            gathering.relay(member, message)
        elif isinstance(message, msg.Relayed):
            gathering.relayed(member, message)

    def _boundary(self, member: Member, event: ev.MessageArrived) -> None:
        boundary = event.message
        assert isinstance(boundary, msg.Boundary)
        if boundary.sequence <= member.sequence or member.state != "training":
            return
        member.count(boundary, self.now)
        self.ledger.trained(member.name, boundary.tokens)
        for fragment, version in boundary.adopted:
            self.merging.adopted(member, fragment, version)
        for fragment, number in boundary.snapshots:
            self.merging.snapshotted(member, fragment, number)
        if boundary.mixed is not None and isinstance(self.merging, Gathering):
            self.merging.mixed(member, boundary.mixed)
        if self.phase == "training" and self.ledger.tokens_trained >= self.budget_tokens:
            self.ending.finish()
        elif self.phase == "training":
            self.merging.open_due()
            if boundary.tokens > 0:
                self.merging.invite(member)
        if member.sequence % 8 == 0:
            self.send(member, msg.Progress(tokens=self.ledger.tokens_trained, sequence=member.sequence))
