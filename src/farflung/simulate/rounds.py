"""Learners around the hub: they step while their island runs, snapshot, adopt, and wait where they must."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from farflung.protocol.lockstep import joiner_step, snapshot_step
from farflung.protocol.policy import Policy
from farflung.simulate.agenda import Agenda
from farflung.simulate.hub import Hub
from farflung.simulate.scenario import Scenario
from farflung.simulate.timeline import Timeline

LEAST_STEP = 0.2  # of the usual time, as in the lab
ANEW_S = (
    600.0  # an island that was dark so long comes back as a new process; before, it goes on where it stood
)


@dataclass
class Tally:
    """What came of some time of one seed.

    Attributes:
        horizon_s: its length.
        worked_s: seconds in steps, of all learners.
        down_s: seconds in which islands stood.
        steps: taken by all learners.
        merges, contributions: of fragments.
        merged_steps: in whole models: steps of one fragment / P.
        bytes_up, bytes_down: bodies, of all learners.
        late, missed: contributions after the close; invitations that lapsed, or partners that did not come.
    """

    horizon_s: float
    worked_s: float = 0.0
    down_s: float = 0.0
    steps: int = 0
    merges: int = 0
    contributions: int = 0
    merged_steps: float = 0.0
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    late: int = 0
    missed: int = 0


@dataclass
class Outgoing:
    """The last contribution of a fragment, until it is adopted or comes to nothing.

    Attributes:
        number: of its round.
        step: own step of the snapshot.
        arrived: it has its place in the round: from the next round on, it is merged.
    """

    number: int
    step: int
    arrived: bool = False


@dataclass
class Learner:
    """One island as the rounds see it. Lists have one entry a fragment."""

    name: str
    timeline: Timeline
    step_s: Callable[[], float]
    num_fragments: int
    step: int = 0
    life: int = 0  # grows when it starts anew: what was scheduled before is void
    stands: bool = True
    worked_s: float = 0.0
    steps: int = 0
    limit: int | None = None  # may not pass this own step
    up_free_s: float = 0.0
    down_free_s: float = 0.0
    held: list[int] = field(init=False)
    newest: list[int] = field(init=False)
    adopted_step: list[int] = field(init=False)  # work after it is not in what the learner adopted
    outgoing: dict[int, Outgoing] = field(default_factory=dict)
    fetching: set[int] = field(default_factory=set)
    ready: dict[int, int] = field(default_factory=dict)
    invited: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        P = self.num_fragments
        self.held, self.newest = [0] * P, [0] * P
        self.adopted_step = [0] * P


class HubRun:
    """Some time of a hub method: decoupled, diloco or streaming.

    Args:
        scenario: of a method with a hub.
        timelines: when each island runs.
        horizon_s: how long.
        rng: chance of step times.
    """

    def __init__(
        self, scenario: Scenario, timelines: list[Timeline], horizon_s: float, rng: np.random.Generator,
        speeds: list[float] | None = None,
    ) -> None:  # fmt: skip
        self.scenario, self.policy, self.horizon_s = scenario, scenario.rules, horizon_s
        self.agenda, self.links = Agenda(), scenario.links
        self.up_bytes = scenario.up_bytes
        self.tally = Tally(horizon_s)
        factors = speeds or [1.0] * scenario.learners
        means = [s * f for s, f in zip(scenario.step_times_s(), factors, strict=True)]
        self.learners = {
            f"learner-{i:03d}": Learner(
                f"learner-{i:03d}",
                timeline,
                step_times(mean, scenario.jitter, rng),
                self.policy.num_fragments,
            )
            for i, (timeline, mean) in enumerate(zip(timelines, means, strict=True))
        }
        self.hub = Hub(self.policy, list(self.learners), self.agenda, self, self.links.merge_s)
        self._offsets = _offsets(self.policy)

    def run(self) -> Tally:
        for learner in self.learners.values():
            self._limit(learner, 0)
            self._watch(learner)
            self.agenda.after(0.0, lambda learner=learner: self._turn(learner))  # type: ignore[misc]
        self.agenda.run_until(self.horizon_s)
        return self._result()

    def _result(self) -> Tally:
        tally, hub = self.tally, self.hub
        for learner in self.learners.values():
            tally.worked_s += learner.worked_s
            tally.steps += learner.steps
            tally.down_s += self.horizon_s - learner.timeline.running_s(0.0, self.horizon_s)
        tally.merges, tally.contributions = hub.merges, hub.contributions
        tally.merged_steps = hub.merged_steps / self.policy.num_fragments
        tally.late, tally.missed = hub.late, hub.missed
        return tally

    # ---- an island stands, and is back ---------------------------------------------------------------

    def _watch(self, learner: Learner) -> None:
        """Silence begins its lease; whoever is back goes on where it stood, or after long rejoins."""
        for start_s, end_s in learner.timeline.downs(self.horizon_s):
            self.agenda.after(start_s, lambda: self.hub.silent(learner.name))
            self.agenda.after(end_s, lambda away_s=end_s - start_s: self._back(learner, away_s))  # type: ignore[misc]

    def _back(self, learner: Learner, away_s: float) -> None:
        self.hub.back(learner.name)
        if away_s < max(ANEW_S, self.policy.lease_s):
            return
        learner.life += 1
        learner.held, learner.newest = list(self.hub.versions), list(self.hub.versions)
        learner.fetching.clear()
        learner.ready.clear()
        learner.invited.clear()
        if self.policy.pace == "lockstep":
            learner.step = joiner_step(learner.held, self.policy.sync_every_steps, self.policy.overlap_steps)
        learner.adopted_step = [learner.step] * self.policy.num_fragments
        learner.outgoing.clear()
        self.tally.bytes_down += self.scenario.down_bytes() * self.policy.num_fragments
        self._limit(learner, self.hub.rounds.syncer_step)
        learner.stands = True
        self._turn(learner)

    # ---- steps ---------------------------------------------------------------------------------------

    def _turn(self, learner: Learner, step_s: float = 0.0) -> None:
        """A boundary, or a look at the mailbox where it stands: adopt, snapshot, report, and step on."""
        snapshots: list[tuple[int, int]] = []
        for _ in range(2):  # lockstep with tau = 0 adopts where it has just snapshotted
            self._adopt(learner)
            snapshots += self._snapshot(learner)
        if step_s > 0 or snapshots:
            self._tell(learner, step_s, snapshots)
        for p, number in snapshots:
            self._upload(learner, p, number)
        if learner.limit is not None and learner.step >= learner.limit:
            learner.stands = True
            return
        learner.stands, life, work_s = False, learner.life, learner.step_s()
        took_s = learner.timeline.after(self.agenda.now, work_s) - self.agenda.now
        self.agenda.after(took_s, lambda: self._step_end(learner, life, work_s, took_s))

    def _step_end(self, learner: Learner, life: int, work_s: float, took_s: float) -> None:
        """What it reports is the time by the clock, standstills included, as a real learner does."""
        if life == learner.life:
            learner.step += 1
            learner.steps += 1
            learner.worked_s += work_s
            self._turn(learner, took_s)

    def _adopt(self, learner: Learner) -> None:
        for p in [*learner.ready]:
            if self.policy.pace == "lockstep" and learner.step < self._adopts_at(learner, p):
                continue
            learner.held[p] = learner.ready.pop(p)
            self._adopted(learner, p)
            self._limit(learner, None)
            self._fetch(learner, p)
            self._want_work(learner, p)

    def _adopted(self, learner: Learner, p: int) -> None:
        """Work that is not in what is adopted is part of the next contribution, where the policy carries it."""
        out, carries = learner.outgoing.get(p), self.policy.carries_tokens
        included = out is not None and out.arrived and learner.held[p] >= out.number
        merged = out is not None and out.arrived and learner.newest[p] >= out.number
        if not carries:
            learner.adopted_step[p] = learner.step
        elif out is not None and included:
            learner.adopted_step[p] = out.step
        if included or (merged and not carries):
            del learner.outgoing[p]

    def _want_work(self, learner: Learner, p: int) -> None:
        """Who was asked and has no work of its own may do one more step, to have something to send."""
        if self.policy.max_lead_steps is None or p not in learner.invited or p in learner.outgoing:
            return
        if learner.step <= learner.adopted_step[p]:
            learner.limit = max(learner.limit or 0, learner.step + 1)

    def _snapshot(self, learner: Learner) -> list[tuple[int, int]]:
        """Take what was asked, or (lockstep) what is due; merged work is never sent again."""
        if self.policy.pace == "lockstep":
            due = {
                p: learner.held[p] + 1
                for p in self._offsets.get(learner.step % self.policy.sync_every_steps, ())
                if snapshot_step(p, learner.held[p] + 1, *self._cycle) == learner.step
                and learner.invited.get(p) != learner.held[p] + 1
            }
            learner.invited.update(due)  # so that it is taken once
        else:
            due = {
                p: n for p, n in learner.invited.items()
                if learner.step > learner.adopted_step[p] and p not in learner.outgoing
            }  # fmt: skip
            for p in due:
                del learner.invited[p]
        return list(due.items())

    def _upload(self, learner: Learner, p: int, number: int) -> None:
        now, steps, base = self.agenda.now, learner.step - learner.adopted_step[p], learner.held[p]
        out = learner.outgoing[p] = Outgoing(number, learner.step)
        learner.up_free_s = max(now, learner.up_free_s) + self.links.up_s(self.up_bytes)
        self.tally.bytes_up += self.up_bytes
        sync_s = learner.up_free_s + self.links.latency_s - now
        told_s = self.links.latency_s  # the message that follows the bytes

        def arrive() -> None:
            out.arrived = self.hub.contribute(learner.name, p, number, base, max(1, steps), sync_s)
            if not out.arrived:
                self._nothing_came(learner, p, out)

        self.agenda.after(sync_s + told_s, arrive)

    @staticmethod
    def _nothing_came(learner: Learner, p: int, out: Outgoing) -> None:
        """Not merged: its work is still the learner's own."""
        if learner.outgoing.get(p) is out:
            del learner.outgoing[p]

    def _tell(self, learner: Learner, step_s: float, snapshots: list[tuple[int, int]]) -> None:
        step = learner.step
        self.agenda.after(
            self.links.latency_s, lambda: self.hub.boundary(learner.name, step, step_s, snapshots)
        )

    # ---- waiting -------------------------------------------------------------------------------------

    @property
    def _cycle(self) -> tuple[int, int]:
        return self.policy.sync_every_steps, self.policy.num_fragments

    def _adopts_at(self, learner: Learner, p: int) -> int:
        return snapshot_step(p, learner.held[p] + 1, *self._cycle) + self.policy.overlap_steps

    def _limit(self, learner: Learner, syncer_step: int | None) -> None:
        """How far it may run without hearing from the hub."""
        if self.policy.pace == "lockstep":
            learner.limit = min(self._adopts_at(learner, p) for p in range(self.policy.num_fragments))
        elif self.policy.max_lead_steps is not None and syncer_step is not None:
            learner.limit = max(learner.limit or 0, syncer_step + self.policy.max_lead_steps)

    # ---- what the hub says ---------------------------------------------------------------------------

    def invite(self, learner: str, fragment: int, number: int) -> None:
        """Arrives after the latency."""
        told = self.learners[learner]

        def hear() -> None:
            out = told.outgoing.get(fragment)
            if out is not None and out.number == number:
                return  # it is on its way
            told.invited[fragment] = number
            if out is not None and not out.arrived:
                self._nothing_came(told, fragment, out)  # its round is over: it was late
            if told.stands and self.policy.max_lead_steps is not None:
                self._want_work(told, fragment)
                self._turn(told)

        self.agenda.after(self.links.latency_s, hear)

    def announce(self, fragment: int, version: int, syncer_step: int) -> None:
        def hear() -> None:
            for learner in self.learners.values():
                learner.newest[fragment] = max(learner.newest[fragment], version)
                self._limit(learner, syncer_step if self.policy.pace == "free" else None)
                self._fetch(learner, fragment)
                if learner.stands and self.policy.max_lead_steps is not None:
                    self._turn(learner)

        self.agenda.after(self.links.latency_s, hear)

    def _fetch(self, learner: Learner, p: int) -> None:
        """The newest version, if the slot is free and it is news."""
        if p in learner.fetching or p in learner.ready or learner.newest[p] <= learner.held[p]:
            return
        learner.fetching.add(p)
        version, life, now = learner.newest[p], learner.life, self.agenda.now
        num_bytes = self.scenario.down_bytes(version - learner.held[p])
        learner.down_free_s = max(now, learner.down_free_s) + self.links.down_s(num_bytes)
        self.tally.bytes_down += num_bytes

        def fetched() -> None:
            if life != learner.life:
                return
            learner.fetching.discard(p)
            learner.ready[p] = version
            if learner.stands:
                self._turn(learner)

        self.agenda.after(learner.down_free_s + self.links.latency_s - now, fetched)


def step_times(mean_s: float, jitter: float, rng: np.random.Generator) -> Callable[[], float]:
    """Seconds of one step after another."""
    if not jitter:
        return lambda: mean_s
    drawn: list[float] = []

    def draw() -> float:
        if not drawn:
            drawn.extend((mean_s * np.maximum(LEAST_STEP, 1 + jitter * rng.standard_normal(512))).tolist())
        return drawn.pop()

    return draw


def _offsets(policy: Policy) -> dict[int, list[int]]:
    """Fragments due at each residue of a step."""
    H, P = policy.sync_every_steps, policy.num_fragments
    found: dict[int, list[int]] = {}
    for p in range(P):
        found.setdefault(p * H // P, []).append(p)
    return found
