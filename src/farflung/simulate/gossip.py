"""Rounds of gasloc: no hub, only pairs. `core.mixing` says who meets whom; a learner waits for its partners only.

As in `protocol.peer`: a learner's vector goes out tau steps before the end of its round, and a partner's may lie
there before it is needed; a learner that has done its steps waits for it with a deadline; a meeting that one side
gave up on, or has passed by, comes about for neither. Who is silent longer than a lease is waited for no more.
Who leaves, and who comes back, begins an epoch: a learner's next round is then at least the epoch's, which brings
those who lag behind to where the others are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from farflung.core.mixing import Members, partners
from farflung.core.quorum import Ema
from farflung.protocol.peer import MIN_WAIT_S, PATIENCE
from farflung.simulate.agenda import Agenda
from farflung.simulate.rounds import ANEW_S, Tally, step_times
from farflung.simulate.scenario import Scenario
from farflung.simulate.timeline import Timeline


@dataclass
class Peer:
    """One island in gossip."""

    name: str
    timeline: Timeline
    round: int = 0
    life: int = 0
    step_ema: Ema = field(default_factory=Ema)
    took: Ema = field(default_factory=Ema)
    misses: dict[str, int] = field(default_factory=dict)
    began_s: float = 0.0
    waits_since_s: float | None = None
    here: set[str] = field(default_factory=set)  # partners whose vector came, in this round
    partners: list[str] = field(default_factory=list)  # of this round
    gone: bool = False


class GossipRun:
    """Some time of gasloc.

    Args:
        scenario: of method gasloc.
        timelines: when each island runs.
        horizon_s: how long.
        rng: chance of step times.
        speeds: factor of each island's step time.
    """

    def __init__(
        self, scenario: Scenario, timelines: list[Timeline], horizon_s: float, rng: np.random.Generator,
        speeds: list[float] | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self.scenario, self.policy, self.horizon_s, self.seed = scenario, scenario.rules, horizon_s, seed
        self.agenda, self.links, self.tally = Agenda(), scenario.links, Tally(horizon_s)
        self.bytes = scenario.up_bytes
        self.peers = {f"learner-{i:03d}": Peer(f"learner-{i:03d}", t) for i, t in enumerate(timelines)}
        factors = speeds or [1.0] * scenario.learners
        self._draw = {
            name: step_times(mean * factor, scenario.jitter, rng)
            for name, mean, factor in zip(self.peers, scenario.step_times_s(), factors, strict=True)
        }
        self._epoch_round = 0
        self._members = Members.of([*self.peers])
        self._early: dict[
            tuple[int, str], set[str]
        ] = {}  # (round, to): vectors that came before they were due
        self._sent: set[tuple[int, str, str]] = set()  # (round, from, to)
        self._over: set[tuple[int, frozenset[str]]] = set()  # meetings that one side gave up on

    def run(self) -> Tally:
        for peer in self.peers.values():
            for start_s, end_s in peer.timeline.downs(self.horizon_s):
                lapses_s = start_s + self.policy.lease_s
                if lapses_s < end_s:
                    anew = end_s - start_s >= max(ANEW_S, self.policy.lease_s)
                    self.agenda.after(lapses_s, lambda peer=peer: self._lapse(peer))  # type: ignore[misc]
                    self.agenda.after(end_s, lambda peer=peer, anew=anew: self._back(peer, anew))  # type: ignore[misc]
            self.agenda.after(0.0, lambda peer=peer: self._begin(peer))  # type: ignore[misc]
        self.agenda.run_until(self.horizon_s)
        for peer in self.peers.values():
            self.tally.down_s += self.horizon_s - peer.timeline.running_s(0.0, self.horizon_s)
            if peer.waits_since_s is None:  # in the middle of its steps
                self.tally.worked_s += peer.timeline.running_s(peer.began_s, self.horizon_s)
        return self.tally

    # ---- who takes part ------------------------------------------------------------------------------

    def _lapse(self, peer: Peer) -> None:
        """Its lease runs out: nobody waits for it."""
        peer.gone = True
        self._new_epoch()
        self._let_go(peer)

    def _back(self, peer: Peer, anew: bool) -> None:
        """It goes on where it stood; a new process begins with a donor's state."""
        peer.gone = False
        self._new_epoch()
        if anew:
            peer.life += 1
            peer.round = self._epoch_round
            self._begin(peer)

    def _new_epoch(self) -> None:
        self._epoch_round = max(p.round for p in self.peers.values()) + 1
        self._members = Members.of(p.name for p in self.peers.values() if not p.gone)

    def _partners_now(self, peer: Peer) -> list[str]:
        """Whom it meets in the round that it begins."""
        if peer.name not in self._members.names:
            return []
        own = self._members.names.index(peer.name)
        found = partners(self.policy.matching, self.seed, peer.round, self._members, own)
        return [self._members.names[j] for j, _ in found]

    def _let_go(self, of: Peer) -> None:
        """Whoever waits in vain for somebody that is gone or in a later round stops waiting."""
        for peer in self.peers.values():
            if peer.waits_since_s is not None and of.name in peer.partners and self._in_vain(peer, of):
                self._over.add((peer.round, frozenset((peer.name, of.name))))
                self._review(peer)

    def _in_vain(self, peer: Peer, of: Peer) -> bool:
        """Whether a partner's vector of this round will never come."""
        return (of.gone or of.round > peer.round) and (peer.round, of.name, peer.name) not in self._sent

    # ---- a round -------------------------------------------------------------------------------------

    def _begin(self, peer: Peer) -> None:
        """Take the local steps of a round: nobody needs to know more of them than when it offers, and their end.

        With an overlap its vector goes out so many steps before the end of the round, and the partners' come
        meanwhile.
        """
        peer.partners = self._partners_now(peer)
        peer.waits_since_s, peer.began_s, life = None, self.agenda.now, peer.life
        H, tau = self.policy.sync_every_steps, self.policy.overlap_steps
        steps_s = [self._draw[peer.name]() for _ in range(H)]
        offers_s = peer.timeline.after(self.agenda.now, sum(steps_s[: H - tau]))
        end_s = peer.timeline.after(self.agenda.now, sum(steps_s))
        if tau:
            self.agenda.after(offers_s - self.agenda.now, lambda: self._offer_early(peer, life))
        self.agenda.after(end_s - self.agenda.now, lambda: self._worked(peer, life, sum(steps_s)))

    def _offer_early(self, peer: Peer, life: int) -> None:
        if life == peer.life:
            self._offer_all(peer)

    def _worked(self, peer: Peer, life: int, work_s: float) -> None:
        if life != peer.life:
            return
        H = self.policy.sync_every_steps
        self.tally.steps += H
        self.tally.worked_s += work_s
        peer.step_ema = peer.step_ema.update(work_s / H)
        self.tally.merges += 1
        self.tally.contributions += 1  # its own
        self.tally.merged_steps += H  # gossip: merged when the round's outer step is taken
        self._meet(peer)

    def _meet(self, peer: Peer) -> None:
        """Wait for the vectors of this round's partners; without overlap its own goes out now."""
        peer.waits_since_s = self.agenda.now
        peer.here = self._early.pop((peer.round, peer.name), set())
        for name in peer.partners:
            if self._in_vain(peer, self.peers[name]):
                self._over.add((peer.round, frozenset((peer.name, name))))
        if not self.policy.overlap_steps:
            self._offer_all(peer)
        round, life = peer.round, peer.life
        self.agenda.after(self._patience_s(peer), lambda: self._overdue(peer, life, round))
        self._review(peer)

    def _offer_all(self, peer: Peer) -> None:
        for name in peer.partners:
            self._offer(peer, name)

    def _offer(self, peer: Peer, to: str) -> None:
        if (peer.round, frozenset((peer.name, to))) in self._over:
            return
        self._sent.add((peer.round, peer.name, to))
        round, took_s = peer.round, self.links.up_s(self.bytes) + self.links.latency_s
        self.tally.bytes_up += self.bytes
        self.tally.bytes_down += self.bytes

        def arrive() -> None:
            other = self.peers[to]
            if other.round == round and other.waits_since_s is not None:
                other.here.add(peer.name)
                self._review(other)
            elif other.round <= round:
                self._early.setdefault((round, to), set()).add(peer.name)

        self.agenda.after(took_s, arrive)

    def _patience_s(self, peer: Peer) -> float:
        """As `protocol.peer.PeerExchange._patience_s`."""
        if self.policy.exchange_s is not None:
            return self.policy.exchange_s
        if peer.took.value is None:
            return self.policy.lease_s
        round_s = self.policy.sync_every_steps * (peer.step_ema.value or 0.0)
        usual = max(MIN_WAIT_S, round_s, PATIENCE * peer.took.value)
        missed = max((peer.misses.get(name, 0) for name in peer.partners), default=0)
        return float(min(self.policy.lease_s, usual * 2 ** min(missed, 10)))

    def _overdue(self, peer: Peer, life: int, round: int) -> None:
        """Give up on partners that did not come, and go on."""
        if life != peer.life or round != peer.round or peer.waits_since_s is None:
            return
        for name in peer.partners:
            if name not in peer.here:
                self._over.add((round, frozenset((peer.name, name))))
        self._review(peer)

    def _review(self, peer: Peer) -> None:
        """Mix as soon as every meeting of the round has come about or has failed."""
        names = peer.partners
        missed = [n for n in names if (peer.round, frozenset((peer.name, n))) in self._over]
        if set(names) - peer.here - set(missed):
            return
        for name in names:
            if name in missed:
                peer.misses[name] = peer.misses.get(name, 0) + 1
                self.tally.missed += 1
            else:
                peer.misses[name] = 0
                self.tally.contributions += 1
        if peer.waits_since_s is not None and len(names) > len(missed):
            peer.took = peer.took.update(self.agenda.now - peer.waits_since_s)
        peer.round = max(peer.round + 1, self._epoch_round)
        self._begin(peer)
        self._let_go(peer)
