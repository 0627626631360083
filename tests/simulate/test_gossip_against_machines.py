"""Pairs wait as the real peers do: lapsed leases, deadlines and epochs included."""

import math

import pytest
from real_runs import Downs, real, simulated, worked

from farflung.methods import gasloc
from farflung.simulate.cluster import Cluster
from farflung.simulate.scenario import Links, Scenario, policy_of
from farflung.simulate.simulating import Effort, simulate

SHORT: Downs = [[(20.3, 28)], [(60, 67)], [], [(85, 94)]]
LONG: Downs = [[(20.3, 38)], [(60, 75)], [], [(85, 100)]]


HORIZON_S = 140.0


def both(downs: Downs, slowest_s: float, overlap: int) -> tuple[float, float]:
    """Seconds in steps: of the real peers, and in the simulation."""
    steps_s, method = [1.0, 1.0, 1.1, slowest_s], gasloc(sync_every_steps=8, overlap_steps=overlap)
    world = real(method, steps_s, downs, HORIZON_S)
    tallies = [simulated(method, steps_s, downs, HORIZON_S, seed) for seed in range(4)]
    return worked(world, steps_s), sum(t.worked_s for t in tallies) / len(tallies)


@pytest.mark.parametrize("downs", [[[], [], [], []], SHORT, LONG])
@pytest.mark.parametrize("slowest_s", [1.0, 1.2])
def test_learners_work_as_much_as_the_real_peers(downs: Downs, slowest_s: float) -> None:
    peers_s, ours_s = both(downs, slowest_s, overlap=0)
    assert ours_s == pytest.approx(peers_s, rel=0.07)


@pytest.mark.parametrize("downs", [[[], [], [], []], SHORT])
def test_with_overlap_too(downs: Downs) -> None:
    peers_s, ours_s = both(downs, 1.2, overlap=3)
    assert ours_s == pytest.approx(peers_s, rel=0.07)


def test_with_overlap_and_lapsed_leases_in_the_mean() -> None:
    found = [both([[(20 + d, 38 + d)], [(60 + d, 75 + d)], [], []], 1.2, overlap=3) for d in (0, 3, 7, 12)]
    peers_s, ours_s = (sum(side) / len(found) for side in zip(*found, strict=True))
    assert ours_s == pytest.approx(peers_s, rel=0.07)


def test_nobody_is_missed_where_nothing_happens() -> None:
    tally = simulated(gasloc(sync_every_steps=8), [1.0] * 4, [[]] * 4, 200.0)
    assert tally.missed == 0
    assert tally.contributions == 2 * tally.merges


def test_an_overlap_hides_an_exchange_that_is_longer_than_a_step() -> None:
    calm = Cluster(chips=4, mtbi_s=math.inf)
    links = Links(params=1e8, up_mbps=1600.0)  # 2 s an exchange

    def goodput(overlap: int) -> float:
        policy = policy_of("gasloc", {"sync_every_steps": 8, "overlap_steps": overlap, "codec": "fp32"})
        scenario = Scenario(method="gasloc", learners=4, cluster=calm, policy=policy, links=links)
        return simulate(scenario, Effort(max_seeds=2, round_steps=160)).goodput.mean

    assert goodput(0) == pytest.approx(8 / 10, abs=0.02)
    assert goodput(1) == pytest.approx(8 / 9, abs=0.02)
    assert goodput(3) == pytest.approx(1.0, abs=0.01)
