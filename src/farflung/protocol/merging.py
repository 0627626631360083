"""The syncer's rounds at work: open, invite, check what arrives, close, announce, retire."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from farflung.core import quorum
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import messages as msg
from farflung.protocol import objects
from farflung.protocol.membership import Member
from farflung.protocol.rounds import PATIENCE_S, Arrived, Round, Rounds, median_step_s

if TYPE_CHECKING:
    from farflung.protocol.syncer import SyncerMachine

NARROW_MERGES = 8  # in a row, at least, before they are worth an alarm (P16)
FATES_KEPT = 8  # rounds of a learner's fragment whose fates are remembered, for repeats


class Merging:
    """Versions of every fragment and how they come to be. Lists have one entry a fragment."""

    def __init__(self, hub: SyncerMachine):
        P = hub.policy.num_fragments
        self.hub, self.policy = hub, hub.policy
        self.rounds = Rounds(hub.policy)
        self.versions = [-1] * P  # -1: not born yet
        self.kept: list[list[int]] = [[] for _ in range(P)]
        self.digests: dict[tuple[int, int], str] = {}  # of kept versions, by (fragment, version)
        self.fates: dict[tuple[str, int, int], dict[int, msg.Fate]] = {}
        self.narrow = 0  # merges of one learner's work in a row

    def born(self, digests: list[str]) -> None:
        for fragment, digest in enumerate(digests):
            self.versions[fragment] = 0
            self.kept[fragment] = [0]
            self.digests[fragment, 0] = digest

    def joined(self, member: Member) -> None:
        """A proven learner begins to train."""

    def moved(self, member: Member, told: msg.RoundMixed | msg.HandedIn) -> None:
        """A learner tells what went past the hub, straight to its partners and from them: with a hub nothing."""

    def validate(self) -> None:
        for fragment, kept in enumerate(self.kept):
            assert kept == sorted(set(kept)), f"fragment {fragment}: versions {kept} are not growing"
            assert not kept or kept[-1] == self.versions[fragment]
            left = [v for v in kept if v not in self._needed_versions(fragment)]
            assert len(left) <= self.policy.versions_kept
        for fragment, round in self.rounds.open.items():
            assert round.fragment == fragment
            for name, arrived in round.arrived.items():
                assert name == arrived.learner

    # ---- opening and inviting ------------------------------------------------------------------------

    def step_s(self) -> float:
        return median_step_s(self.hub.membership.training(), self.hub.now) or 0.0

    def open_due(self) -> None:
        """Free pace: open the rounds that are due and set the clock for the next one."""
        while self.hub.phase == "training" and self.policy.pace == "free" and self.rounds.may_open():
            step_s = median_step_s(self.hub.membership.training(), self.hub.now)
            at = self.rounds.next_opening_s(step_s, self.hub.now)
            if at is None:
                return
            if at > self.hub.now:
                self.hub.timer("open", at)
                return
            round = self._open(self.rounds.next_fragment)
            self._ask(round, self.hub.membership.training())

    def _open(self, fragment: int, final: bool = False) -> Round:
        live = frozenset(m.name for m in self.hub.membership.training() if m.live(self.hub.now))
        if self.policy.pace == "lockstep":  # round r makes version r
            self.rounds.next_number[fragment] = self.versions[fragment] + (2 if final else 1)
        round = self.rounds.start(fragment, self.hub.now, live, final)
        self.hub.note("round_open", fragment=fragment, round=round.number, final=final)
        if not final:
            self.hub.timer(f"round.{fragment}", self.hub.now + self.policy.lease_s)
        return round

    def invite(self, member: Member) -> None:
        """Metadata of a finished step invites its learner to every round that still wants it (free pace).

        Who is training when a round opens was asked then, without waiting for a report: the answer is taken
        at the end of the step under way, so it is work of a step that finished after the round opened.
        """
        if self.policy.pace == "free":
            for fragment in sorted(self.rounds.open):
                self._ask(self.rounds.open[fragment], [member])
                self.review(fragment)

    def _ask(self, round: Round, members: list[Member]) -> None:
        """Invite those who are to be asked now."""
        now = self.hub.now
        there = [m for m in members if m.connection is not None or m.live(now)]  # others, when they are back
        wanted = [m for m in there if self.rounds.wants(round, m, now)]
        step_s = self.step_s() if wanted else 0.0
        for member in wanted:
            self.rounds.invite(round, member, now, step_s)
            self.hub.send(member, msg.Invite(fragment=round.fragment, round=round.number))

    def _ask_again(self, round: Round) -> None:
        """Below quorum: repeat invitations whose deadline passed, also to those who wait and report no steps."""
        if self.policy.pace == "free":
            self._ask(round, [m for m in self.hub.membership.training() if m.name in round.invited])

    def snapshotted(self, member: Member, fragment: int, number: int) -> None:
        """A learner snapshotted for a round; lockstep rounds open with their first snapshot."""
        held = self.holding(member.name)
        for older in self.hub.ledger.unsettled(member.name, fragment):
            if (fragment, older) in held:
                detail = f"snapshot for round {number} of fragment {fragment} while round {older} is open"
                self.hub.refuse(member.name, "two_in_flight", detail)
                return
            self.hub.ledger.settled(member.name, fragment, older, "late")  # it will never come
        self.hub.ledger.snapshotted(member.name, fragment, number)
        fates = self.fates.get((member.name, member.incarnation, fragment), {})
        if fates.get(number) != "merged":
            fates.pop(number, None)  # another attempt at a round that refused the first: no repeat
        opens = self.policy.pace == "lockstep" and self.hub.phase == "training"
        if opens and fragment not in self.rounds.open and number == self.versions[fragment] + 1:
            self._open(fragment)

    def adopted(self, member: Member, fragment: int, version: int) -> None:
        member.held[fragment] = version
        self.hub.ledger.adopted(member.name, fragment)
        self.retire(fragment)

    def holding(self, learner: str) -> set[tuple[int, int]]:
        """(fragment, round) of this learner's contributions that lie in open rounds."""
        return {(p, r.number) for p, r in self.rounds.open.items() if learner in r.arrived}

    # ---- arriving ------------------------------------------------------------------------------------

    def has(self, member: Member, fragment: int, number: int) -> bool:
        """Whether this contribution of this incarnation came before: it lies in a round, or has its fate."""
        if number in self.fates.get((member.name, member.incarnation, fragment), {}):
            return True
        round = self.rounds.open.get(fragment)
        arrived = round.arrived.get(member.name) if round is not None and round.number == number else None
        return arrived is not None and arrived.incarnation == member.incarnation

    def contribute(self, member: Member, event: ev.MessageArrived) -> None:
        """Give a contribution its place in the open round, or a fate at once. A repeat changes nothing."""
        message = event.message
        assert isinstance(message, msg.Contribute)
        p, number = message.fragment, message.round
        object_name = objects.contribution(member.name, member.incarnation, p, number)
        fates = self.fates.setdefault((member.name, member.incarnation, p), {})
        if number in fates:
            self.hub.refuse(member.name, "repeat", f"fragment {p} round {number} is already {fates[number]}")
            self.hub.send(member, msg.FateOf(fragment=p, round=number, fate=fates[number], reason="repeat"))
            return
        round = self.rounds.open.get(p)
        if round is not None and round.number == number and member.name in round.arrived:
            self.hub.refuse(member.name, "repeat", f"fragment {p} round {number} already lies here")
            if round.arrived[member.name].incarnation != member.incarnation:
                self._remember(member.name, member.incarnation, p, number, "late")
                self.hub.emit(act.Discard(object=object_name))
                reason = "your earlier incarnation's contribution is in this round"
                self.hub.send(member, msg.FateOf(fragment=p, round=number, fate="late", reason=reason))
            return
        fate, reason = self._check(member, message, event, round)
        if fate is not None:
            self._turn_away(member, message, object_name, fate, reason)
            if fate != "late" and round is not None and round.number == number:
                self._restart_in_lockstep(member, reason)
            return
        assert round is not None
        member.non_finite[p] = 0
        arrived = Arrived(
            object_name, member.name, member.incarnation, message.base_version,
            message.steps, message.tokens, message.sync_s, event.norm or 0.0,
        )  # fmt: skip
        step_s = self.step_s() if round.quorum_s is None else 0.0  # for the grace window, set at the quorum
        self.rounds.arrive(round, arrived, self.hub.now, self._needed(round), step_s)
        self.review(p)

    def _check(
        self, member: Member, message: msg.Contribute, event: ev.MessageArrived, round: Round | None
    ) -> tuple[msg.Fate | None, str]:
        """None if the contribution may be merged, else its fate and why."""
        p, base = message.fragment, message.base_version
        if member.state != "training":
            return "rejected", f"not_training: your state is {member.state}"
        if event.problem is not None:
            return "rejected", event.problem
        if not event.finite:
            return "rejected", "non_finite"
        if not 0 <= base <= member.announced[p]:
            return (
                "rejected",
                f"base version {base} was never announced to you (newest: {member.announced[p]})",
            )
        if message.steps < 1 or message.tokens < 0:
            return "rejected", f"steps = {message.steps}, tokens = {message.tokens}: nothing to merge"
        if base not in self.kept[p]:
            return "stale_base", f"base version {base} is gone (kept: {self.kept[p]})"
        if round is None or round.number != message.round or round.merging:
            return "late", "the round had closed"
        return None, ""

    def _turn_away(
        self, member: Member, message: msg.Contribute, object_name: str, fate: msg.Fate, reason: str
    ) -> None:
        self._remember(member.name, member.incarnation, message.fragment, message.round, fate)
        self.hub.settle(member, message.fragment, message.round, fate, reason)
        self.hub.emit(act.Discard(object=object_name))
        if fate == "rejected":
            self.hub.refuse(
                member.name, reason.partition(" ")[0].rstrip(":"), f"fragment {message.fragment}: {reason}"
            )
        if reason == "non_finite":
            member.non_finite[message.fragment] += 1
            self.hub.admission.maybe_reset(member)
        elif fate == "late":
            self.hub.note("late", learner=member.name, fragment=message.fragment, round=message.round)

    def _restart_in_lockstep(self, member: Member, reason: str) -> None:
        """Its snapshot of the open round was refused. Nobody invites again there, and all may wait for it."""
        if self.policy.pace == "lockstep" and self.hub.phase == "training" and member.state == "training":
            self.hub.admission.reset(member, f"its contribution was refused: {reason}")

    def _remember(self, learner: str, incarnation: int, fragment: int, round: int, fate: msg.Fate) -> None:
        if incarnation != self.hub.membership.members[learner].incarnation:
            return  # nobody is left to ask
        fates = self.fates.setdefault((learner, incarnation, fragment), {})
        fates[round] = fate
        while len(fates) > FATES_KEPT:
            del fates[min(fates)]

    def forget_fates(self, learner: str) -> None:
        """A new process took the learner's name: the old one's contributions cannot be repeated."""
        for key in [key for key in self.fates if key[0] == learner]:
            del self.fates[key]

    def repeat_fates(self, member: Member) -> None:
        """Tell a member that was away what was merged last of each fragment: the message may have been lost.

        Of other fates it will ask, by a repeat; the one we know may be that of an earlier attempt.
        """
        for p in range(self.policy.num_fragments):
            fates = self.fates.get((member.name, member.incarnation, p), {})
            merged = [number for number, fate in fates.items() if fate == "merged"]
            if merged:
                fate = msg.FateOf(fragment=p, round=max(merged), fate="merged", reason="repeat")
                self.hub.send(member, fate)

    # ---- closing -------------------------------------------------------------------------------------

    def _needed(self, round: Round) -> int:
        known, now = self.hub.membership.members, self.hub.now
        at_open = round.members if self.policy.quorum == "all" else ()  # a number does not ask for them
        lapsed = {name for name in at_open if not known[name].live(now)}
        return quorum.required(self.policy.quorum, at_open, lapsed)

    def review_all(self) -> None:
        for fragment in sorted(self.rounds.open):
            self.review(fragment)

    def review(self, fragment: int) -> None:
        """Close the round of a fragment if it is time; else say why not, and when to look again."""
        round = self.rounds.open.get(fragment)
        if round is None or round.merging or round.final or self.hub.phase != "training":
            return
        now, needed = self.hub.now, self._needed(round)
        may_come = set()  # matters to a round that has its quorum
        if len(round.arrived) >= needed:
            left = [m for m in self.hub.membership.sorted() if m.name not in round.arrived]
            may_come = {m.name for m in left if m.progressing(now, PATIENCE_S)}
        decision = self.rounds.review(round, now, needed, may_come)
        if decision.close:
            self.hub.timer(f"round.{fragment}", None)
            self.close(round)
            return
        again = decision.wait_until_s
        if again is None:
            self._ask_again(round)
            again = min((at for at in round.invited.values() if at > now), default=now + self.policy.lease_s)
        if len(round.arrived) < needed and now >= round.noted_s + self.policy.lease_s / 2:
            round.noted_s = now
            self.hub.note(
                "waiting", fragment=fragment, round=round.number, reason=decision.reason, deadline_s=again
            )
        self.hub.timer(f"round.{fragment}", max(again, now + 1e-3))

    def close(self, round: Round) -> None:
        round.merging = True
        final = round.final and self.policy.final == "average"
        parts = round.parts(self.policy.weighting, clip=self.policy.clip == "median")
        version = self.versions[round.fragment] + 1
        if cut := {part.learner: part.scale for part in parts if part.scale is not None}:
            self.hub.note("clipped", fragment=round.fragment, version=version, scales=cut)
        self.hub.emit(act.Merge(fragment=round.fragment, version=version, parts=parts, final=final))

    def merge_done(self, event: ev.MergeDone) -> None:
        p = event.fragment
        round = self.rounds.finish(p)
        self.versions[p] = event.version
        self.kept[p].append(event.version)
        self.digests[p, event.version] = event.digest
        if round.arrived:
            transfer_s = fmean(a.sync_s for a in round.arrived.values())
            self.rounds.xi_sync = self.rounds.xi_sync.update(transfer_s + event.merge_s)
        for name in sorted(round.arrived):
            self._settle_merged(round, round.arrived[name], event)
        self._note_merged(round, event)
        if not round.final:  # of the last merge nobody makes use any more
            for member in self.hub.membership.present():
                self.announce(member, p)
        self.retire(p)
        self.open_due()
        self.hub.ending.review()

    def _settle_merged(self, round: Round, arrived: Arrived, event: ev.MergeDone) -> None:
        member = self.hub.membership.members[arrived.learner]
        fate: msg.Fate = "merged" if event.finite else "rejected"
        self._remember(arrived.learner, arrived.incarnation, round.fragment, round.number, fate)
        life = member.life
        if event.finite and life is not None and life.incarnation == arrived.incarnation:
            life.included[round.fragment] = round.number
        if member.incarnation != arrived.incarnation:
            self.hub.ledger.settled(member.name, round.fragment, round.number, fate)
            return
        self.hub.settle(
            member, round.fragment, round.number, fate, "" if event.finite else "merge_not_finite"
        )
        if event.finite:
            member.included[round.fragment] = round.number
            member.merged += 1
            self.hub.admission.merged(member)

    def _note_merged(self, round: Round, event: ev.MergeDone) -> None:
        live = len([m for m in self.hub.membership.training() if m.live(self.hub.now)])
        reached = round.quorum_s
        self.hub.note(
            "merged", fragment=event.fragment, version=event.version, breadth=len(round.arrived), live=live,
            learners=sorted(round.arrived), tokens=sum(a.tokens for a in round.arrived.values()),
            quorum_s=None if reached is None else reached - round.opened_s, grace_s=round.grace_s,
            norm=event.norm, missed=sorted(round.missed - set(round.arrived)),
        )  # fmt: skip
        self._watch_breadth(len(round.arrived), live)
        if not event.finite:
            detail = f"fragment {event.fragment}: version {event.version} holds the old value"
            self.hub.note("alarm", what="merge_not_finite", detail=detail)

    def _watch_breadth(self, breadth: int, live: int) -> None:
        """Raise an alarm when two cycles of merges held the work of one learner although more are live."""
        self.narrow = self.narrow + 1 if breadth <= 1 < live else 0
        if self.narrow == max(NARROW_MERGES, 2 * self.policy.num_fragments):
            detail = f"the last {self.narrow} merges held one learner's work each, {live} are live"
            self.hub.note("alarm", what="narrow_merges", detail=detail)

    def announce(self, member: Member, fragment: int) -> None:
        """Tell a member that was sent `Install` of the newest version."""
        if member.announced[fragment] < 0:
            return
        member.announced[fragment] = self.versions[fragment]
        self.hub.send(
            member,
            msg.Announce(
                fragment=fragment, version=self.versions[fragment],
                included=member.included[fragment], syncer_step=self.rounds.syncer_step,
            ),
        )  # fmt: skip

    def retire(self, fragment: int) -> None:
        """Let go of versions that are nobody's base any more, and of all but the newest tau + 2.

        What a joiner is to install stays: else a joiner on a slow line would begin again and again. So does the
        base of what lies in an open round, which may be such an old version.
        """
        present = self.hub.membership.present()
        holders = [m.held[fragment] for m in present if m.announced[fragment] >= 0]
        kept, needed = self.kept[fragment], self._needed_versions(fragment)
        oldest = min([*holders, *needed, self.versions[fragment]])
        left = [version for version in kept if version not in needed]
        while left and (left[0] < oldest or len(left) > self.policy.versions_kept):
            version = left.pop(0)
            kept.remove(version)
            self.digests.pop((fragment, version), None)
            self.hub.emit(act.Retire(fragment=fragment, version=version))

    def _needed_versions(self, fragment: int) -> set[int]:
        """Those that joiners are fetching, to begin with, and bases of contributions that wait for their merge.

        Without a link nobody fetches: who has lost it while it installed begins anew, or has all that it needs.
        """
        linked = [m for m in self.hub.membership.present() if m.connection is not None]
        round = self.rounds.open.get(fragment)
        lying = [] if round is None else [a.base_version for a in round.arrived.values()]
        return {*lying, *(m.expected.versions[fragment] for m in linked if m.expected is not None)}

    # ---- ending --------------------------------------------------------------------------------------

    def cancel_open(self) -> None:
        """Give back what lies in rounds that have not begun to merge."""
        for fragment in sorted(self.rounds.open):
            round = self.rounds.open[fragment]
            if round.merging:
                continue
            del self.rounds.open[fragment]
            self.hub.timer(f"round.{fragment}", None)
            for name in sorted(round.arrived):
                arrived = round.arrived[name]
                member = self.hub.membership.members[name]
                self.hub.emit(act.Discard(object=arrived.object))
                if member.incarnation == arrived.incarnation:
                    self.hub.settle(member, fragment, round.number, "cancelled", "the run is ending")
                else:
                    self.hub.ledger.settled(name, fragment, round.number, "learner_lost")
            self.retire(fragment)

    def open_final(self) -> list[int]:
        """One round a fragment for the hand-in; returns their numbers."""
        return [self._open(p, final=True).number for p in range(self.policy.num_fragments)]

    def close_final(self) -> None:
        for fragment in sorted(self.rounds.open):
            round = self.rounds.open[fragment]
            if round.final and not round.merging:
                self.close(round)
