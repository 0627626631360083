"""The hub of a gossip run: it says who is there, keeps the ledger, and takes consensus averages.

No training passes through it. It tells all members of each *epoch* (who may meet whom, from each learner's next
round on), enters every round's work in the ledger when the learner reports its mix, sees when only one side of a
meeting mixed, and asks for everybody's parameters now and then: their average is the next version of the model,
to be evaluated and, at the end, to be kept. Learners do not wait for any of it, and go on without it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import messages as msg
from farflung.protocol.membership import Member
from farflung.protocol.merging import Merging
from farflung.protocol.rounds import Round

if TYPE_CHECKING:
    from farflung.protocol.syncer import SyncerMachine

MOST_AHEAD = 1000  # rounds of one learner, of all others: a number beyond is a mistake
SIDES_KEPT = 4096  # meetings of which only one side has reported, at least


class Gathering(Merging):
    """Epochs, and consensus averages in place of merges. Only fragment 0 exists."""

    def __init__(self, hub: SyncerMachine):
        super().__init__(hub)
        self.seed = int.from_bytes(hashlib.blake2b(hub.run.encode(), digest_size=6).digest())
        self.epoch = 0
        self.members: list[str] = []  # of the epoch
        self.assemble_by_s: float | None = None  # the first epoch waits for the expected learners so long
        self.round = -1  # newest that any learner ended
        self.gathered = 0  # averages that were due so far
        self.meetings = 0  # that took place, as the side that told first saw it
        self.missed: dict[str, int] = {}  # that did not, by reason
        self.half_exchanges = 0
        self.distance: float | None = None  # consensus distance of the newest average
        self.direct: dict[str, tuple[int, int]] = {}  # by learner: bytes straight to partners, and from them
        self._told: list[tuple[str, str | None]] = []  # names and addresses of the epoch's members
        self._sides: dict[
            tuple[int, int, str, str], tuple[str, bool, float]
        ] = {}  # first report of a meeting

    # ---- epochs --------------------------------------------------------------------------------------

    def review_all(self) -> None:
        super().review_all()
        if self.hub.phase == "training":
            self._review_members()

    def joined(self, member: Member) -> None:
        """A proven learner begins to train."""
        self._review_members()

    def _review_members(self) -> None:
        """Begin an epoch when other learners are there than its members, or one is to be dialled elsewhere.

        Who has no connection just now stays a member while its lease lives, but does not become one.
        """
        training, now, known = self.hub.membership.training(), self.hub.now, set(self.members)
        present = [m for m in training if m.live(now) and (m.name in known or m.connection is not None)]
        names, told = [m.name for m in present], [(m.name, m.address) for m in present]
        if told == self._told or not self._assembled(len(names)):
            return
        self.epoch += 1
        self.members, self._told = names, told
        self.hub.note("epoch", number=self.epoch, round=self._next_round, members=names)
        message = self._message()
        for member in present:
            self.hub.send(member, message)

    def _assembled(self, present: int) -> bool:
        """Whether the first epoch may begin: all expected learners are there, or they had their time.

        So it is again after a resume, which restores the number of the last epoch, and not its members.
        """
        if self.members or present >= self.hub.num_learners:
            return True
        if self.assemble_by_s is None and present:
            self.assemble_by_s = self.hub.now + self.policy.lease_s
        return self.assemble_by_s is not None and self.hub.now >= self.assemble_by_s

    @property
    def _next_round(self) -> int:
        """One that no learner has begun: those who are furthest are in ``round + 1``."""
        return self.round + 2 if self.round >= 0 else 0

    def _message(self) -> msg.Epoch:
        known = self.hub.membership.members
        peers = [msg.Peer(name=n, address=known[n].address, mbps=known[n].mbps) for n in self.members]
        return msg.Epoch(number=self.epoch, round=self._next_round, seed=self.seed, members=peers)

    def repeat_fates(self, member: Member) -> None:
        super().repeat_fates(member)
        if self.hub.phase == "training":
            self._review_members()
        if self.members and member.state == "training":
            self.hub.send(member, self._message())

    # ---- rounds of the learners ----------------------------------------------------------------------

    def mixed(self, member: Member, mixed: msg.RoundMixed) -> None:
        """A learner ended a round: its work is in parameters that others will meet."""
        if mixed.epoch > self.epoch or mixed.round > self.round + MOST_AHEAD:
            newest = f"the newest are {self.round} and {self.epoch}"
            self.hub.refuse(member.name, "round", f"round {mixed.round} of epoch {mixed.epoch}: {newest}")
            return
        self._enter(member, mixed.round)
        member.mbps = mixed.mbps or member.mbps
        self.round = max(self.round, mixed.round)
        if any(not meeting.missed for meeting in mixed.meetings):
            member.merged += 1
            self.hub.admission.merged(member)
        self.moved(member, mixed)
        for meeting in mixed.meetings:
            self._compare(member.name, mixed, meeting)

    def moved(self, member: Member, told: msg.RoundMixed | msg.HandedIn) -> None:
        up, down = self.direct.get(member.name, (0, 0))
        self.direct[member.name] = up + told.bytes_up, down + told.bytes_down

    @property
    def bytes_up(self) -> int:
        """Straight to partners, of all learners."""
        return sum(up for up, _ in self.direct.values())

    @property
    def bytes_down(self) -> int:
        """Straight from partners, of all learners."""
        return sum(down for _, down in self.direct.values())

    def _enter(self, member: Member, round: int) -> None:
        """All that a learner trained so far is merged."""
        ledger = self.hub.ledger
        ledger.snapshotted(member.name, 0, round)
        ledger.settled(member.name, 0, round, "merged")
        ledger.adopted(member.name, 0)

    def _compare(self, name: str, mixed: msg.RoundMixed, meeting: msg.Meeting) -> None:
        """Both sides of a meeting should have mixed, or none: else the mean of all learners moved."""
        pair = sorted((name, meeting.partner))
        key = (mixed.epoch, mixed.round, pair[0], pair[1])
        took = not meeting.missed
        other = self._sides.get(key)
        if other is not None and other[0] == name:
            return  # once more
        self._sides.pop(key, None)
        if other is None:
            self._count(meeting)
            self._sides[key] = (name, took, mixed.correction)
            if len(self._sides) > max(SIDES_KEPT, 4 * len(self.members)):
                del self._sides[next(iter(self._sides))]
        elif other[1] != took:
            self.half_exchanges += 1
            correction = mixed.correction if took else other[2]
            self.hub.note(
                "half_exchange", epoch=mixed.epoch, round=mixed.round, learners=pair,
                drift=correction / max(1, len(self.members)),
            )  # fmt: skip

    def _count(self, meeting: msg.Meeting) -> None:
        if meeting.missed:
            self.missed[meeting.missed] = self.missed.get(meeting.missed, 0) + 1
        else:
            self.meetings += 1

    # ---- relaying ------------------------------------------------------------------------------------

    def relay(self, member: Member, message: msg.Relay) -> None:
        """A vector for a learner that its sender cannot dial lies here: tell its receiver."""
        receiver = self.hub.membership.members.get(message.partner)
        if receiver is None or receiver.connection is None:
            self.hub.emit(act.Discard(object=message.object))
            self._answer(member, message.partner, message.object, "unreachable")
            return
        self.hub.send(
            receiver, msg.Relay(partner=member.name, object=message.object, num_bytes=message.num_bytes)
        )

    def relayed(self, member: Member, message: msg.Relayed) -> None:
        """The receiver fetched it, or does not want it: tell the sender, and let go of it."""
        sender = self.hub.membership.members.get(message.partner)
        self.hub.emit(act.Discard(object=message.object))
        if sender is not None:
            self._answer(sender, member.name, message.object, message.refusal)

    def _answer(self, sender: Member, receiver: str, object_name: str, refusal: str) -> None:
        self.hub.send(sender, msg.Relayed(partner=receiver, object=object_name, refusal=refusal))

    # ---- consensus averages --------------------------------------------------------------------------

    def open_due(self) -> None:
        """Ask for everybody's parameters when the budget's next part is spent."""
        if self.hub.phase != "training" or not self.policy.gathers or not self.epoch:
            return
        parts = self.policy.gathers + 1
        due = self.hub.ledger.tokens_trained * parts // self.hub.budget_tokens
        if due > self.gathered and 0 not in self.rounds.open:
            self.gathered = due
            round = self._open(0)
            for member in self.hub.membership.training():
                self.hub.send(member, msg.Invite(fragment=0, round=round.number))

    def invite(self, member: Member) -> None:
        """All are asked at once, when the round opens."""

    def snapshotted(self, member: Member, fragment: int, number: int) -> None:
        """An offer to a partner is not the hub's business."""

    def adopted(self, member: Member, fragment: int, version: int) -> None:
        """Learners keep their own parameters."""

    def announce(self, member: Member, fragment: int) -> None:
        super().announce(member, fragment)
        if member.announced[fragment] >= 0:
            member.held[fragment] = member.announced[fragment]

    def review(self, fragment: int) -> None:
        """Average when everybody's parameters are here, or those that came within a lease."""
        round = self.rounds.open.get(fragment)
        if round is None or round.merging or round.final or self.hub.phase != "training":
            return
        missing = any(self._still_comes(m, round) for m in self.hub.membership.sorted())
        until_s = round.opened_s + self.policy.lease_s
        if missing and self.hub.now < until_s:
            self.hub.timer(f"round.{fragment}", until_s)
        elif round.arrived:
            self.hub.timer(f"round.{fragment}", None)
            self.close(round)
        else:
            reason = "nobody has shown its parameters"
            self.hub.note("round_given_up", fragment=fragment, round=round.number, reason=reason)
            self.cancel_open()

    def _still_comes(self, member: Member, round: Round) -> bool:
        awaited = member.name in round.members and member.name not in round.arrived
        return awaited and member.state == "training" and member.live(self.hub.now)

    def merge_done(self, event: ev.MergeDone) -> None:
        round = self.rounds.open[event.fragment]
        if round.final and event.finite:
            for name in sorted(round.arrived):
                member = self.hub.membership.members[name]
                if member.incarnation == round.arrived[name].incarnation:
                    self._enter(member, self.round + 1 + round.number)
        super().merge_done(event)

    def _note_merged(self, round: Round, event: ev.MergeDone) -> None:
        super()._note_merged(round, event)
        self.distance = event.norm
        self.hub.note(
            "consensus", version=event.version, round=self.round, learners=sorted(round.arrived),
            distance=event.norm,
        )  # fmt: skip

    def _watch_breadth(self, breadth: int, live: int) -> None:
        """An average of one learner's parameters is no alarm here."""
