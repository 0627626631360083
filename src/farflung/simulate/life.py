"""One island's life, event by event: it runs, is interrupted, reconfigures, goes on.

The entity is the island: a failure costs one event however many chips there are, and chips that run cost nothing.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from farflung.simulate.cluster import Cluster

CHUNK = 512  # random numbers drawn at once
CAUSES = ("reconfiguring", "waiting for chips", "outage", "fewer chips", "checkpoints", "lost work")
RECONFIGURING, CHIPS, OUTAGE, FEWER, CHECKPOINTS, REWORK = CAUSES


@dataclass(frozen=True)
class Strike:
    """What befalls an island from outside: a share of its chips is gone for a while."""

    at_s: float
    until_s: float
    share: float  # of the island's chips, in (0, 1]


@dataclass
class Life:
    """When an island ran.

    Attributes:
        horizon_s: how long it was watched, seconds from 0.
        starts_s, ends_s: spans in which it ran.
        shares: of its chips that took part in each span, in (0, 1].
        lost_s: seconds lost by cause; those of fewer chips weighted by how many were missing.
        failures: (when, how long the chips stayed away) of every interruption, seconds.
    """

    horizon_s: float
    starts_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    lost_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    failures: list[tuple[float, float]] = field(default_factory=list)

    @property
    def running_s(self) -> float:
        return float(np.subtract(self.ends_s, self.starts_s).sum())

    @property
    def goodput(self) -> float:
        """Share of the work that all chips could have done in this time and that counts, 0..1."""
        return 1.0 - sum(self.lost_s.values()) / self.horizon_s

    def downs(self) -> Iterator[tuple[float, float]]:
        """(from, until) of each time that it stood."""
        before = 0.0
        for start, end in zip(self.starts_s, self.ends_s, strict=True):
            if start > before:
                yield before, start
            before = end
        if before < self.horizon_s:
            yield before, self.horizon_s


class _Draws:
    """Random numbers of one island, drawn in chunks."""

    def __init__(self, cluster: Cluster, rng: np.random.Generator) -> None:
        self._cluster, self._rng = cluster, rng
        self._gaps: list[float] = []
        self._delays: list[float] = []
        rates = [1 / cluster.mtbi_s, *(1 / burst.chips / burst.mtbi_s for burst in cluster.bursts)]
        self._sizes = [1, *(burst.chips for burst in cluster.bursts)]
        self._cumulated = np.cumsum(rates) / sum(rates) if sum(rates) else None

    def gap(self) -> float:
        """Hazard until the next failure, exponential with mean 1."""
        if not self._gaps:
            self._gaps = self._rng.exponential(size=CHUNK).tolist()
        return self._gaps.pop()

    def delay_s(self) -> float:
        if not self._delays:
            self._delays = self._cluster.returns.draw(self._rng, CHUNK).tolist()
        return self._delays.pop()

    def size(self) -> int:
        """Chips that fail together."""
        if len(self._sizes) == 1 or self._cumulated is None:
            return 1
        return self._sizes[int(np.searchsorted(self._cumulated, self._rng.random(), side="right"))]


class Living:
    """Simulates one island.

    Args:
        cluster: of the island: its own chips.
        horizon_s: how long.
        rng: its chance.
        strikes: what comes from outside, by time.
    """

    def __init__(
        self, cluster: Cluster, horizon_s: float, rng: np.random.Generator, strikes: Sequence[Strike] = ()
    ) -> None:
        self.cluster, self.life = cluster, Life(horizon_s)
        self._draws, self._strikes = _Draws(cluster, rng), list(reversed(strikes))
        self._away: list[tuple[float, int, float]] = []  # (until, number, chips) of those known to be away
        self._missing = 0.0  # chips
        self._number = 0
        self._hazard = self._draws.gap()
        self._since_checkpoint_s = 0.0
        self._now = 0.0

    def run(self) -> Life:
        """Until the horizon."""
        life, cluster = self.life, self.cluster
        while self._now < life.horizon_s:
            if self._missing >= cluster.chips:
                self._stand_until(self._away[0][0], OUTAGE)
                self._reconfigure(cluster.up_s)
                continue
            fails = self._now + self._hazard / max(
                cluster.failures_per_s(cluster.chips - self._missing), 1e-300
            )
            back = self._away[0][0] if self._away else float("inf")
            struck = self._strikes[-1].at_s if self._strikes else float("inf")
            self._run_until(min(fails, back, struck, life.horizon_s))
            if self._now >= life.horizon_s:
                break
            if struck <= self._now:
                self._interrupt(*self._next_strike(), OUTAGE)
            elif fails <= self._now:
                self._fail()
            else:
                self._reconfigure(cluster.up_s)  # somebody is back
        return life

    # ---- what happens --------------------------------------------------------------------------------

    def _fail(self) -> None:
        delay_s = self._draws.delay_s()
        self._hazard = self._draws.gap()
        self.life.failures.append((self._now, delay_s))
        self._interrupt(self._now + delay_s, float(self._draws.size()), CHIPS)

    def _next_strike(self) -> tuple[float, float]:
        strike = self._strikes.pop()
        return strike.until_s, strike.share * self.cluster.chips

    def _interrupt(self, until_s: float, chips: float, cause: str) -> None:
        """Chips are gone: reconfigure without them, or wait for all of them."""
        self._lose_work()
        self._leave(until_s, chips)
        if self.cluster.elastic:
            self._reconfigure(self.cluster.down_s)
            return
        while self._away and self._now < self.life.horizon_s:  # a strike may come while it waits
            self._stand_until(max(entry[0] for entry in self._away), cause)
            self._absorb()
        self._reconfigure(self.cluster.up_s)

    def _leave(self, until_s: float, chips: float) -> None:
        self._number += 1
        heapq.heappush(self._away, (until_s, self._number, chips))
        self._missing += chips

    def _lose_work(self) -> None:
        """Go back to the last checkpoint."""
        if self.cluster.checkpoint_every_s:
            self.life.lost_s[REWORK] += self._since_checkpoint_s
            self._since_checkpoint_s = 0.0

    # ---- time ----------------------------------------------------------------------------------------

    def _run_until(self, until_s: float) -> None:
        life, cluster, span_s = self.life, self.cluster, until_s - self._now
        share = 1.0 - self._missing / cluster.chips
        self._hazard -= span_s * cluster.failures_per_s(cluster.chips - self._missing)
        if span_s > 0:
            life.lost_s[FEWER] += span_s * (1 - share)
            if life.ends_s and life.ends_s[-1] == self._now and life.shares[-1] == share:
                life.ends_s[-1] = until_s
            else:
                life.starts_s.append(self._now)
                life.ends_s.append(until_s)
                life.shares.append(share)
            if cluster.checkpoint_every_s:
                period_s = cluster.checkpoint_every_s + cluster.checkpoint_cost_s
                life.lost_s[CHECKPOINTS] += span_s * share * cluster.checkpoint_cost_s / period_s
                self._since_checkpoint_s = (self._since_checkpoint_s + span_s) % cluster.checkpoint_every_s
        self._now = until_s

    def _stand_until(self, until_s: float, cause: str) -> None:
        until_s = min(max(until_s, self._now), self.life.horizon_s)
        self.life.lost_s[cause] += until_s - self._now
        self._now = until_s

    def _reconfigure(self, takes_s: float) -> None:
        """Stand, and take in whoever is back by the end of it."""
        self._stand_until(self._now + takes_s, RECONFIGURING)
        self._absorb()

    def _absorb(self) -> None:
        while self._strikes and self._strikes[-1].at_s <= self._now:  # came while it stood
            self._leave(*self._next_strike())
        while self._away and self._away[0][0] <= self._now:
            self._missing -= heapq.heappop(self._away)[2]
        if not self._away:
            self._missing = 0.0


def live(
    cluster: Cluster, horizon_s: float, rng: np.random.Generator, strikes: Sequence[Strike] = ()
) -> Life:
    """One island's life.

    >>> island = Cluster(chips=1000, mtbi_s=1e5, down_s=5.0, up_s=5.0)
    >>> life = live(island, 10_000.0, np.random.default_rng(0))
    >>> 0.9 < life.goodput < 0.95
    True
    """
    return Living(cluster, horizon_s, rng, strikes).run()


def uptime(lives: Sequence[Life], least: int) -> float:
    """Share of the time in which at least so many islands ran.

    >>> uptime([Life(10.0, [0.0], [4.0], [1.0]), Life(10.0, [2.0], [8.0], [1.0])], 2)
    0.2
    """
    starts = np.concatenate([life.starts_s for life in lives])
    ends = np.concatenate([life.ends_s for life in lives])
    moments = np.concatenate([starts, ends])
    changes = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    order = np.argsort(moments, kind="stable")
    running = np.cumsum(changes[order])[:-1]
    spans_s = np.diff(moments[order])
    return float(spans_s[running >= least].sum() / lives[0].horizon_s)
