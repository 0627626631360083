"""From scenario to outcome: chance that repeats, shares that add up, what depends on rounds and what does not."""

import math

import pytest

from farflung.core.codecs import get_codec
from farflung.core.traffic import framed_bytes
from farflung.errors import UserError
from farflung.simulate.cluster import Cluster, Outage
from farflung.simulate.outcome import Estimate
from farflung.simulate.returns import Returns
from farflung.simulate.scenario import Links, Scenario, policy_of
from farflung.simulate.simulating import Effort, simulate, slowest_chip, waits

QUICK = Effort(round_steps=60, round_seeds=2, max_seeds=6, half_width=0.02)
MANY = Cluster(chips=1_200_000)


def test_equal_seeds_give_equal_outcomes() -> None:
    scenario = Scenario(method="decoupled", learners=4, cluster=MANY)
    assert simulate(scenario, QUICK) == simulate(scenario, QUICK)
    other = Effort(round_steps=60, round_seeds=2, max_seeds=6, half_width=0.02, seed=1)
    assert simulate(scenario, QUICK) != simulate(scenario, other)


@pytest.mark.parametrize("method", ["data_parallel", "decoupled", "diloco", "streaming", "gasloc"])
def test_goodput_and_losses_add_up_to_one(method: str) -> None:
    M = 1 if method == "data_parallel" else 4
    outcome = simulate(Scenario(method=method, learners=M, cluster=MANY), QUICK)
    assert outcome.goodput.mean + sum(outcome.lost.values()) == pytest.approx(1.0)
    assert 0 < outcome.goodput.mean < 1
    assert 0 < outcome.uptime.mean <= 1
    assert 0 <= outcome.merged_share.mean <= 1


@pytest.mark.parametrize("learners", [2, 8, 16])
def test_m_learners_are_one_learner_with_m_times_fewer_chips(learners: int) -> None:
    fewer = Cluster(chips=MANY.chips // learners)
    one = simulate(Scenario(method="data_parallel", learners=1, cluster=fewer), QUICK)
    many = simulate(Scenario(method="decoupled", learners=learners, cluster=MANY), QUICK)
    assert many.goodput.mean == pytest.approx(one.goodput.mean, abs=0.02)
    assert many.uptime.mean > one.uptime.mean + 0.04
    assert learners < 8 or many.uptime.mean == pytest.approx(1.0, abs=1e-6)


def test_who_waits_for_nobody_has_the_goodput_of_the_islands() -> None:
    free = Scenario(method="decoupled", learners=4, cluster=MANY)
    led = Scenario(
        method="decoupled", learners=4, cluster=MANY,
        policy=policy_of("decoupled", {"quorum": 4, "max_lead_steps": 2}),
    )  # fmt: skip
    assert (waits(free), waits(led)) == (False, True)
    freely, bound = simulate(free, QUICK), simulate(led, QUICK)
    assert "waiting for others" not in freely.lost
    assert bound.lost["waiting for others"] > 0.1
    assert bound.goodput.mean < freely.goodput.mean


def test_a_region_costs_its_share_of_the_time() -> None:
    region = Outage(name="region", num_domains=4, mtbi_s=1e6, lasts=Returns(scale_s=1e5))
    calm = Cluster(chips=1_000_000, mtbi_s=math.inf, outages=(region,))
    outcome = simulate(Scenario(method="decoupled", learners=8, cluster=calm), QUICK)
    assert outcome.lost["outage"] == pytest.approx(1 / 11, abs=0.02)  # 1e5 of every 1.1e6 s


@pytest.mark.parametrize("behind", [None, 1, 2, 3, 9])
def test_a_version_is_fetched_by_increments_where_they_lead_there_and_are_fewer_bytes(
    behind: int | None,
) -> None:
    options = {"sync_every_steps": 20, "codec": "int8", "downlink_codec": "int8"}
    scenario = Scenario(
        method="diloco", learners=4, cluster=MANY, policy=policy_of("diloco", options), links=Links(params=1e5)
    )  # fmt: skip
    whole, one = 400_000, get_codec("int8").size_bytes(100_000)
    by_increments = behind is not None and behind <= scenario.rules.versions_kept
    wanted = min(whole, behind * one) if by_increments and behind is not None else whole
    assert scenario.down_bytes(behind) == framed_bytes(wanted)


def test_bytes_are_those_of_the_codec() -> None:
    def rate(codec: str) -> float:
        policy = policy_of("decoupled", {"codec": codec})
        calm = Cluster(chips=4, mtbi_s=math.inf)
        links = Links(params=24e6)
        outcome = simulate(
            Scenario(method="decoupled", learners=4, cluster=calm, policy=policy, links=links), QUICK
        )
        return outcome.bytes_up_per_s

    assert rate("fp32") == pytest.approx(4e6, rel=0.05)  # 1e6 parameters a step
    assert rate("fp32") / rate("int4") == pytest.approx(32 / 4.125, rel=0.01)  # with one fp16 scale a block


def test_a_job_on_more_chips_has_a_slower_slowest_one() -> None:
    import numpy as np

    def mean(chips: int) -> float:
        rng = np.random.default_rng(0)
        return float(
            np.mean([slowest_chip(Cluster(chips=chips, speed_spread=0.02), rng) for _ in range(200)])
        )

    assert 1.03 < mean(100) < mean(100_000) < 1.1


def test_the_interval_shrinks_with_seeds() -> None:
    assert Estimate.of([1.0]).half_width == math.inf
    assert Estimate.of([1.0, 2.0] * 20).half_width < Estimate.of([1.0, 2.0] * 2).half_width


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"learners": 0}, "learners = 0"),
        ({"method": "dilco"}, "did you mean 'diloco'"),
        ({"learners": 2, "policy": policy_of("decoupled", {"quorum": 3})}, "at most the 2 learners"),
        ({"method": "data_parallel"}, "one job over all chips"),
        ({"step_s": 0.0}, "step_s = 0.0"),
        (
            {"method": "data_parallel", "learners": 1, "links": Links(up_mbps=100.0)},
            "up_mbps = 100: no effect",
        ),
        ({"policy": policy_of("diloco", {})}, "policy.method"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(options: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Scenario(**{"method": "decoupled", "learners": 8, "cluster": MANY, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["up_mbps", "down_mbps"])
def test_a_link_without_bandwidth_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=name):
        Links(**{name: 0.0})
