"""The syncer in a simulation: the rounds of `protocol.rounds`, asked as `protocol.merging` asks them.

Who is invited, when a round opens and closes and how long its grace is, decide `Rounds`, `Member` and
`core.quorum`: the code that trains. What is left out is what costs nothing in rounds: birth, proofs, digests,
acknowledgements, the ledger. `tests/simulate/test_rounds_against_machines.py` compares both.
"""

from __future__ import annotations

from statistics import fmean
from typing import Protocol

from farflung.core import quorum
from farflung.protocol.membership import Member
from farflung.protocol.messages import Boundary
from farflung.protocol.policy import Policy
from farflung.protocol.rounds import PATIENCE_S, Arrived, Round, Rounds, median_step_s
from farflung.simulate.agenda import Agenda, What


class Listener(Protocol):
    """What the hub says to learners."""

    def invite(self, learner: str, fragment: int, number: int) -> None: ...

    def announce(self, fragment: int, version: int, syncer_step: int) -> None: ...


class Hub:
    """Opens, closes and merges.

    Args:
        policy: of the method.
        names: of the learners.
        agenda: the heap of moments.
        listener: who hears of invitations and versions.
        merge_s: seconds of a merge.
    """

    def __init__(
        self, policy: Policy, names: list[str], agenda: Agenda, listener: Listener, merge_s: float
    ) -> None:
        self.policy, self.agenda, self.listener, self.merge_s = policy, agenda, listener, merge_s
        self.rounds = Rounds(policy)
        self.versions = [0] * policy.num_fragments
        self.members = {name: Member(name, i, state="training") for i, name in enumerate(sorted(names))}
        for member in self.members.values():
            member.lease_until_s = float("inf")
        self._all = list(self.members.values())
        self.merges = self.contributions = self.late = self.missed = 0
        self.merged_steps = 0.0  # inner steps of one fragment
        self._timers: dict[str, float] = {}

    # ---- what it hears -------------------------------------------------------------------------------

    def boundary(self, name: str, step: int, step_s: float, snapshots: list[tuple[int, int]]) -> None:
        """Metadata of a boundary; `step_s` 0 where a wait ended."""
        member, now = self.members[name], self.agenda.now
        tokens = 1 if step_s > 0 else 0
        member.count(Boundary(sequence=member.sequence + 1, step=step, step_s=step_s, tokens=tokens), now)
        for fragment, number in snapshots:
            lockstep = self.policy.pace == "lockstep" and fragment not in self.rounds.open
            if lockstep and number == self.versions[fragment] + 1:
                self._open(fragment)
        self.open_due()
        if self.policy.pace == "free" and tokens:
            for fragment in sorted(self.rounds.open):
                self._ask(self.rounds.open[fragment], [member])
                self.review(fragment)

    def contribute(self, name: str, fragment: int, number: int, base: int, steps: int, sync_s: float) -> bool:
        """A contribution has arrived. Whether it has its place in the round; none has one whose base is gone."""
        round = self.rounds.open.get(fragment)
        gone = self.versions[fragment] - base >= self.policy.versions_kept
        if round is None or round.number != number or round.merging or gone:
            self.late += 1
            return False
        arrived = Arrived(f"{name}.{fragment}.{number}", name, 0, 0, steps, steps, sync_s)
        step_s = self._step_s() if round.quorum_s is None else 0.0
        self.rounds.arrive(round, arrived, self.agenda.now, self._needed(round), step_s)
        self.review(fragment)
        return True

    def silent(self, name: str) -> None:
        """A learner stands; its lease runs out unless it is back."""
        self.members[name].lease_until_s = self.agenda.now + self.policy.lease_s
        self.agenda.after(self.policy.lease_s + 1e-6, self._review_all)

    def back(self, name: str) -> None:
        self.members[name].lease_until_s = float("inf")

    # ---- rounds, as in protocol.merging --------------------------------------------------------------

    def open_due(self) -> None:
        while self.policy.pace == "free" and self.rounds.may_open():
            at = self.rounds.next_opening_s(median_step_s(self._all, self.agenda.now), self.agenda.now)
            if at is None:
                return
            if at > self.agenda.now:
                self._timer("open", at, self.open_due)
                return
            self._ask(self._open(self.rounds.next_fragment), self._all)

    def _open(self, fragment: int) -> Round:
        now = self.agenda.now
        live = frozenset(m.name for m in self._all if m.live(now))
        self.rounds.next_number[fragment] = self.versions[fragment] + 1
        return self.rounds.start(fragment, now, live)

    def _step_s(self) -> float:
        return median_step_s(self._all, self.agenda.now) or 0.0

    def _ask(self, round: Round, members: list[Member]) -> None:
        wanted = [m for m in members if self.rounds.wants(round, m, self.agenda.now)]
        step_s = self._step_s() if wanted else 0.0
        for member in wanted:
            self.rounds.invite(round, member, self.agenda.now, step_s)
            self.listener.invite(member.name, round.fragment, round.number)

    def _needed(self, round: Round) -> int:
        at_open = round.members if self.policy.quorum == "all" else ()
        lapsed = {name for name in at_open if not self.members[name].live(self.agenda.now)}
        return quorum.required(self.policy.quorum, at_open, lapsed)

    def _review_all(self) -> None:
        for fragment in sorted(self.rounds.open):
            self.review(fragment)

    def review(self, fragment: int) -> None:
        """Close the round if it is time, else look again later."""
        round, now = self.rounds.open.get(fragment), self.agenda.now
        if round is None or round.merging:
            return
        needed, may_come = self._needed(round), set()
        if len(round.arrived) >= needed:
            may_come = {
                m.name for m in self._all if m.name not in round.arrived and m.progressing(now, PATIENCE_S)
            }
        decision = self.rounds.review(round, now, needed, may_come)
        if decision.close:
            round.merging = True
            self.agenda.after(self.merge_s, lambda: self._merged(round))
            return
        again = decision.wait_until_s
        if again is None:
            if self.policy.pace == "free":
                self._ask(round, [m for m in self._all if m.name in round.invited])
            again = min((at for at in round.invited.values() if at > now), default=now + self.policy.lease_s)
        self._timer(f"round.{fragment}", max(again, now + 1e-3), lambda: self.review(fragment))

    def _merged(self, round: Round) -> None:
        fragment = round.fragment
        self.rounds.finish(fragment)
        self.versions[fragment] += 1
        transfer_s = fmean(a.sync_s for a in round.arrived.values())
        self.rounds.xi_sync = self.rounds.xi_sync.update(transfer_s + self.merge_s)
        self.merges += 1
        self.contributions += len(round.arrived)
        self.missed += len(round.missed - set(round.arrived))
        self.merged_steps += sum(a.steps for a in round.arrived.values())
        self.listener.announce(fragment, self.versions[fragment], self.rounds.syncer_step)
        self.open_due()

    def _timer(self, name: str, at_s: float, what: What) -> None:
        """The newest timer of a name replaces the one before."""
        if self._timers.get(name) == at_s:
            return
        self._timers[name] = at_s

        def fire() -> None:
            if self._timers.get(name) == at_s:
                del self._timers[name]
                what()

        self.agenda.after(at_s - self.agenda.now, fire)
