"""From a scenario to its outcome: seed after seed, until goodput is known well enough.

Failures of chips are frequent, outages of regions are rare. The time that one seed is watched follows the
failures; what outages cost is added from a watch of its own, much longer, in which islands know only outages.
The two multiply, because a rare outage meets an island in the steady state of its frequent failures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import NormalDist

import numpy as np

from farflung.simulate.cluster import Cluster
from farflung.simulate.gossip import GossipRun
from farflung.simulate.life import CAUSES, OUTAGE, RECONFIGURING, Life, live, uptime
from farflung.simulate.outages import strikes
from farflung.simulate.outcome import Estimate, Outcome
from farflung.simulate.rounds import HubRun, Tally
from farflung.simulate.scenario import Scenario
from farflung.simulate.timeline import Timeline

WAITING = "waiting for others"
FAILURES_A_SEED = 2000  # of all islands together, in the mean
LEAST_SEEDS = 4
WARM_UP = 5  # mean lives of an island that pass before its rounds are watched
SHORTEST_S, LONGEST_S = 1e3, 3e9  # of one seed's watch
OUTAGES_A_SEED = 300


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How hard to try.

    Args:
        half_width: of goodput's 95 % confidence interval, at which to stop.
        max_seeds: at most so many.
        round_steps: inner steps of each seed whose rounds are simulated; 0: only what follows from lives.
        round_seeds: seeds whose rounds are simulated, where learners wait for nobody; else all.
        seed: of the first.
    """

    half_width: float = 0.01
    max_seeds: int = 64
    round_steps: int = 300
    round_seeds: int = 4
    seed: int = 0


USUAL = Effort()


@dataclass(frozen=True)
class Sample:
    """What one seed showed."""

    goodput: float
    uptime: float
    lost: dict[str, float]
    tally: Tally | None
    speed: float  # mean over islands of nominal / actual step rate


def simulate(scenario: Scenario, effort: Effort = USUAL) -> Outcome:
    """Simulate a scenario until its goodput's confidence half-width is reached, or the seeds are used up.

    >>> island = Cluster(chips=100_000)
    >>> outcome = simulate(Scenario(method="data_parallel", learners=1, cluster=island))
    >>> 0.89 < outcome.goodput.mean < 0.95
    True
    """
    samples: list[Sample] = []
    sources = np.random.SeedSequence(effort.seed).spawn(effort.max_seeds)
    for number, source in enumerate(sources):
        samples.append(_sample(scenario, effort, number, np.random.default_rng(source)))
        known = Estimate.of([s.goodput for s in samples]).half_width
        if len(samples) >= min(LEAST_SEEDS, effort.max_seeds) and known <= effort.half_width:
            break
    return _outcome(scenario, samples)


# ---- one seed ------------------------------------------------------------------------------------------


def waits(scenario: Scenario) -> bool:
    """Whether a learner may ever wait for others, so that goodput depends on rounds."""
    if scenario.method == "data_parallel":
        return False
    policy = scenario.rules
    return scenario.method == "gasloc" or policy.pace == "lockstep" or policy.max_lead_steps is not None


def _sample(scenario: Scenario, effort: Effort, number: int, rng: np.random.Generator) -> Sample:
    M, island = scenario.learners, scenario.cluster.island(scenario.learners)
    speeds = [slowest_chip(island, rng) for _ in range(M)]
    lives = [live(island, watch_s(scenario, effort), rng) for _ in range(M)]
    goodput, lost = _of_lives(lives)
    up = uptime(lives, scenario.quorum)
    tally = None
    coupled = waits(scenario)
    if scenario.method != "data_parallel" and effort.round_steps and (coupled or number < effort.round_seeds):
        tally = _rounds(scenario, lives, speeds, effort, rng)
        if coupled:
            goodput, lost = _with_waiting(goodput, lost, tally, M)
    if scenario.cluster.outages:
        goodput, lost, up = _with_outages(scenario, goodput, lost, up, rng)
    return Sample(goodput, up, lost, tally, float(np.mean([1 / s for s in speeds])))


def slowest_chip(island: Cluster, rng: np.random.Generator) -> float:
    """How much longer a step takes than at a chip of average speed: a job runs at its slowest chip."""
    if not island.speed_spread:
        return 1.0
    quantile = min(max(float(rng.random()) ** (1 / island.chips), 1e-12), 1 - 1e-12)
    return max(1e-3, 1 + island.speed_spread * NormalDist().inv_cdf(quantile))


def watch_s(scenario: Scenario, effort: Effort) -> float:
    """How long one seed is watched."""
    island = scenario.cluster.island(scenario.learners)
    rate = island.failures_per_s(island.chips)
    wanted_s = inf if rate == 0 else FAILURES_A_SEED / (rate * scenario.learners)
    if not island.elastic:  # its clock stands while it waits
        wanted_s += FAILURES_A_SEED / scenario.learners * island.returns.mean_s
    if waits(scenario):
        wanted_s = max(wanted_s, effort.round_steps * scenario.step_s * (1 + scenario.slowest) * 1.2)
    return min(max(wanted_s, SHORTEST_S), LONGEST_S) if wanted_s < inf else SHORTEST_S


def _of_lives(lives: Sequence[Life]) -> tuple[float, dict[str, float]]:
    """Goodput and losses of islands that wait for nobody."""
    lost = {cause: float(np.mean([one.lost_s[cause] / one.horizon_s for one in lives])) for cause in CAUSES}
    return 1.0 - sum(lost.values()), lost


def _rounds(
    scenario: Scenario, lives: Sequence[Life], speeds: list[float], effort: Effort, rng: np.random.Generator
) -> Tally:
    """The rounds of some time in the middle of these lives."""
    horizon_s = min(effort.round_steps * scenario.step_s * (1 + scenario.slowest), lives[0].horizon_s)
    from_s = min(WARM_UP * _mean_life_s(scenario), lives[0].horizon_s - horizon_s)
    timelines = [Timeline.of(one, max(0.0, from_s)) for one in lives]
    if scenario.method == "gasloc":
        seed = int(rng.integers(2**31))
        return GossipRun(scenario, timelines, horizon_s, rng, speeds, seed=seed).run()
    return HubRun(scenario, timelines, horizon_s, rng, speeds).run()


def _mean_life_s(scenario: Scenario) -> float:
    island = scenario.cluster.island(scenario.learners)
    rate = island.failures_per_s(island.chips)
    return 1 / rate if rate else 0.0


def _with_waiting(
    goodput: float, lost: dict[str, float], tally: Tally, M: int
) -> tuple[float, dict[str, float]]:
    """Of the time in which islands ran, only some was spent in steps."""
    ran_s = M * tally.horizon_s - tally.down_s
    worked = min(1.0, tally.worked_s / ran_s) if ran_s > 0 else 0.0
    return goodput * worked, {**lost, WAITING: goodput * (1 - worked)}


def _with_outages(
    scenario: Scenario, goodput: float, lost: dict[str, float], up: float, rng: np.random.Generator
) -> tuple[float, dict[str, float], float]:
    """Rare outages: how often which islands are there, times how they do while they are."""
    cluster, M = scenario.cluster, scenario.learners
    rate = sum(outage.num_domains / outage.mtbi_s for outage in cluster.outages)
    horizon_s = OUTAGES_A_SEED / rate
    calm = replace(cluster.island(M), mtbi_s=inf, bursts=())
    befalls = strikes(cluster, M, horizon_s, rng)
    lives = [live(calm, horizon_s, rng, own) for own in befalls]
    left, own_lost = _of_lives(lives)
    found = {cause: share * left for cause, share in lost.items()}
    found[OUTAGE] = found.get(OUTAGE, 0.0) + sum(v for k, v in own_lost.items() if k != RECONFIGURING)
    found[RECONFIGURING] = found.get(RECONFIGURING, 0.0) + own_lost[RECONFIGURING]
    present = uptime(lives, scenario.quorum) if M > 1 else lives[0].running_s / horizon_s
    return goodput * left, found, up * present


# ---- all seeds -----------------------------------------------------------------------------------------


def _outcome(scenario: Scenario, samples: Sequence[Sample]) -> Outcome:
    M, tallies = scenario.learners, [s.tally for s in samples if s.tally is not None]
    causes = sorted({cause for s in samples for cause in s.lost})
    lost = {c: float(np.mean([s.lost.get(c, 0.0) for s in samples])) for c in causes}
    goodput = Estimate.of([s.goodput for s in samples])
    speeds = [s.speed for s in samples]
    steps_per_s = float(np.mean([1 / step_s for step_s in scenario.step_times_s()])) * float(np.mean(speeds))
    tokens_per_s = goodput.mean * M * steps_per_s * scenario.tokens_per_step
    one = Estimate(1.0, 0.0)
    merged = _over(tallies, lambda t: t.merged_steps / t.steps if t.steps else 0.0) if tallies else one
    breadth = _over(tallies, lambda t: t.contributions / t.merges if t.merges else 0.0) if tallies else one
    asked = sum(t.contributions + t.missed + t.late for t in tallies)

    def a_second(field: Callable[[Tally], float]) -> float:
        return sum(field(t) for t in tallies) / sum(t.horizon_s for t in tallies) / M if tallies else 0.0

    return Outcome(
        goodput=goodput, uptime=Estimate.of([s.uptime for s in samples]), merge_breadth=breadth,
        merged_share=merged, tokens_trained_per_s=tokens_per_s,
        tokens_merged_per_s=tokens_per_s * merged.mean,
        lost={cause: share for cause, share in lost.items() if share > 0},
        bytes_up_per_s=a_second(lambda t: t.bytes_up), bytes_down_per_s=a_second(lambda t: t.bytes_down),
        missed_share=sum(t.missed for t in tallies) / asked if asked else 0.0, seeds=len(samples),
    )  # fmt: skip


def _over(tallies: Sequence[Tally], value: Callable[[Tally], float]) -> Estimate:
    return Estimate.of([value(tally) for tally in tallies])
