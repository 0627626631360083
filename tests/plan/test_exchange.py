"""Closed forms of transfers and waits are what the simulator finds, where nothing fails."""

import math
from typing import Any

import pytest

from farflung.methods import METHODS
from farflung.plan.candidate import Candidate
from farflung.plan.exchange import data_parallel, exchange
from farflung.plan.setting import Setting
from farflung.simulate.cluster import Cluster
from farflung.simulate.outcome import Outcome
from farflung.simulate.scenario import Scenario
from farflung.simulate.simulating import Effort, simulate

M = 4
EFFORT = Effort(max_seeds=2, round_steps=1000)


def setting(up: float, down: float, **more: Any) -> Setting:
    """A GB in fp32; 250 Mbit/s: 16 s in bf16."""
    options = {"params": 2.5e8, "islands": M, "latency_s": 0.05, "merge_s": 0.1, "step_s": 1.0}
    return Setting(up_mbps=up, down_mbps=down, **(options | more))


def simulated(given: Setting, candidate: Candidate) -> Outcome:
    gossip = candidate.policy.topology == "gossip"
    return simulate(
        Scenario(
            method=candidate.simulated_as.method, learners=M, cluster=Cluster(chips=M, mtbi_s=math.inf),
            policy=candidate.simulated_as, step_s=given.step_s, slowest=given.slowest,
            links=given.partner_links(M) if gossip else given.links(M),
        ),
        EFFORT,
    )  # fmt: skip


def made(method: str, **options: Any) -> Candidate:
    return Candidate(learners=M, policy=METHODS[method](**options).policy)


LOCKSTEP = [
    ("diloco", {"sync_every_steps": 20}, 800.0, 800.0, 0.0),
    ("diloco", {"sync_every_steps": 50, "codec": "int4"}, 200.0, 1000.0, 0.0),
    ("diloco", {"sync_every_steps": 50}, 300.0, 500.0, 0.18),
    ("sparseloco", {"sync_every_steps": 20}, 100.0, 800.0, 0.0),
    ("streaming", {"sync_every_steps": 20, "num_fragments": 4, "overlap_steps": 2}, 800.0, 800.0, 0.0),
    ("streaming", {"sync_every_steps": 40, "num_fragments": 4, "overlap_steps": 1}, 400.0, 600.0, 0.0),
    ("streaming", {"sync_every_steps": 20, "num_fragments": 4, "overlap_steps": 5}, 1500.0, 1500.0, 0.0),
    ("diloco", {"sync_every_steps": 20, "codec": "2bit", "downlink_codec": "int4"}, 100.0, 100.0, 0.0),
    ("gasloc", {"sync_every_steps": 20}, 500.0, 500.0, 0.0),
    ("gasloc", {"sync_every_steps": 50, "codec": "int4"}, 100.0, 300.0, 0.0),
]


@pytest.mark.parametrize(("method", "options", "up", "down", "slowest"), LOCKSTEP)
def test_time_in_steps_is_that_of_the_simulator(
    method: str, options: dict[str, Any], up: float, down: float, slowest: float
) -> None:
    given, candidate = setting(up, down, slowest=slowest), made(method, **options)
    assert exchange(given, candidate).share == pytest.approx(
        simulated(given, candidate).goodput.mean, rel=0.03
    )


@pytest.mark.parametrize(("method", "options", "up", "down", "slowest"), LOCKSTEP)
def test_bytes_are_those_of_the_simulator(
    method: str, options: dict[str, Any], up: float, down: float, slowest: float
) -> None:
    given, candidate = setting(up, down, slowest=slowest), made(method, **options)
    found, outcome = exchange(given, candidate), simulated(given, candidate)
    rounds_s = found.rounds / found.cycle_s
    for own, simulated_per_s in (
        (found.up_bytes, outcome.bytes_up_per_s),
        (found.down_bytes, outcome.bytes_down_per_s),
    ):
        cut = own * found.rounds / EFFORT.round_steps  # by the end of the watch: up to one cycle
        assert own * rounds_s == pytest.approx(simulated_per_s, rel=0.01, abs=cut)


FREE = {"sync_every_steps": 24, "num_fragments": 24}


@pytest.mark.parametrize("quorum", [1, 4])
@pytest.mark.parametrize("codec", ["fp32", "int4"])
@pytest.mark.parametrize("tau", [1, 2, 5])
@pytest.mark.parametrize("mbps", [150.0, 300.0, 600.0, 2000.0])
def test_what_fits_is_merged_by_all(quorum: int, codec: str, tau: int, mbps: float) -> None:
    given = setting(mbps, mbps)
    candidate = made("decoupled", **FREE, quorum=quorum, codec=codec, overlap_steps=tau)
    found, outcome = exchange(given, candidate), simulated(given, candidate)
    assert outcome.goodput.mean == pytest.approx(1.0)
    if found.fits:
        assert outcome.merge_breadth.mean > 0.95 * M
        assert outcome.bytes_up_per_s == pytest.approx(
            found.up_bytes * found.rounds / found.cycle_s, rel=0.08
        )


def test_links_that_cannot_keep_up_do_not_fit() -> None:
    found = exchange(setting(100.0, 100.0), made("decoupled", **FREE))
    assert not found.fits and "a cycle's exchanges take 80" in found.problem


def test_an_exchange_longer_than_h_steps_does_not_fit() -> None:
    found = exchange(setting(100.0, 100.0), made("diloco", sync_every_steps=100))
    assert not found.fits and found.problem.startswith("an exchange takes 160")
    assert exchange(setting(1000.0, 1000.0), made("diloco", sync_every_steps=100)).fits


def test_partners_that_do_not_wait_long_enough_do_not_fit() -> None:
    given, fast = setting(200.0, 200.0), setting(2000.0, 2000.0)
    candidate = made("gasloc", sync_every_steps=100)  # 20 s in bf16; a lease is 10 s
    assert "partners wait 10 s at most" in exchange(given, candidate).problem
    assert simulated(given, candidate).merge_breadth.mean < 1.5
    assert exchange(fast, candidate).fits and simulated(fast, candidate).merge_breadth.mean > 1.9


def test_all_learners_share_the_line_of_the_hub() -> None:
    alone, shared = setting(1000.0, 1000.0), setting(1000.0, 1000.0, hub_mbps=1000.0)
    candidate = made("diloco", sync_every_steps=100)
    assert exchange(shared, candidate).up_s == pytest.approx(M * exchange(alone, candidate).up_s)
    assert exchange(shared, candidate).binds == "hub link"
    assert exchange(alone, candidate).binds in ("uplink", "downlink")
    gossip = made("gasloc")
    assert exchange(shared, gossip).takes_s == exchange(alone, gossip).takes_s  # no hub in it


def test_parts_of_an_island_share_its_link() -> None:
    given = setting(1000.0, 1000.0, chips=2)
    two = Candidate(learners=2 * M, policy=METHODS["diloco"]().policy)
    assert exchange(given, two).up_s == pytest.approx(2 * exchange(given, made("diloco")).up_s)


def test_the_reference_is_a_ring() -> None:
    found = data_parallel(setting(1000.0, 1000.0))
    assert found.bytes_each == 2 * 3 / 4 * 1e9
    assert found.ring_s == pytest.approx(12 + 6 * 0.05)
    assert data_parallel(setting(1000.0, 1000.0, islands=1)).share == 1.0
