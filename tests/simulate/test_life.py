"""One island's life: closed forms, causes that add up, and a cost that does not grow with the chips."""

import numpy as np
import pytest

from farflung.simulate.cluster import Burst, Cluster
from farflung.simulate.life import CAUSES, Life, Strike, live, uptime
from farflung.simulate.returns import Returns


def lived(horizon_s: float = 2e5, strikes: list[Strike] | None = None, **options: object) -> Life:
    cluster = Cluster(chips=1000, **{"mtbi_s": 1e5, **options})  # type: ignore[arg-type]
    return live(cluster, horizon_s, np.random.default_rng(0), strikes or [])


def test_chips_that_never_fail_lose_nothing() -> None:
    assert lived(mtbi_s=float("inf")).goodput == 1.0


def test_an_island_that_waits_for_its_chips_follows_the_renewal_formula() -> None:
    life = lived(1e6, elastic=False, returns=Returns(scale_s=65.0), up_s=15.0)
    assert life.goodput == pytest.approx(1 / (1 + (65 + 15) / 100), abs=0.02)


def test_an_elastic_island_pays_twice_a_failure_unless_returns_are_absorbed() -> None:
    late = lived(returns=Returns(scale_s=5000.0, shape=20.0), down_s=10.0, up_s=10.0)
    u = (
        late.goodput
    )  # returns come at the rate of failures, and cost nothing while it stands: 1 - u = a u + a u^2
    assert 1 - u == pytest.approx(
        0.1 * u + 0.1 * u**2, abs=0.01 + late.lost_s["fewer chips"] / late.horizon_s
    )


def test_equal_failures_give_an_equal_life_however_many_chips() -> None:
    small = live(Cluster(chips=1000, mtbi_s=1e6), 1e5, np.random.default_rng(1))
    large = live(Cluster(chips=10**9, mtbi_s=1e12), 1e5, np.random.default_rng(1))
    assert len(small.failures) == len(large.failures)
    assert small.goodput == pytest.approx(large.goodput, abs=1e-3)


@pytest.mark.parametrize("elastic", [True, False])
def test_every_second_has_one_cause(elastic: bool) -> None:
    strikes = [Strike(5e4, 6e4, 1.0), Strike(9e4, 9.5e4, 0.3)]
    burst = Burst(name="host", chips=8, mtbi_s=1e6)
    life = lived(
        strikes=strikes, elastic=elastic, bursts=(burst,), checkpoint_every_s=50.0, checkpoint_cost_s=1.0
    )
    stood = sum(life.lost_s[c] for c in ("reconfiguring", "waiting for chips", "outage"))
    assert life.running_s + stood == pytest.approx(life.horizon_s)
    assert set(life.lost_s) == set(CAUSES)
    never = "waiting for chips" if elastic else "fewer chips"
    assert [cause for cause, seconds in life.lost_s.items() if seconds == 0] == [never]
    assert 0 < life.goodput < 1


def test_a_lost_island_stands_until_it_is_back() -> None:
    life = lived(mtbi_s=float("inf"), strikes=[Strike(1e4, 3e4, 1.0)], down_s=5.0, up_s=7.0)
    assert life.lost_s["outage"] == pytest.approx(2e4 - 5.0)
    assert list(life.downs()) == [(1e4, 3e4 + 7.0)]


def test_a_region_that_is_a_quarter_of_a_job_costs_a_quarter() -> None:
    life = lived(mtbi_s=float("inf"), strikes=[Strike(0.0, 1e5, 0.25)], down_s=0.0, up_s=0.0)
    assert life.goodput == pytest.approx(1 - 0.25 / 2)


def test_work_since_the_last_checkpoint_is_lost() -> None:
    life = lived(checkpoint_every_s=20.0)
    lost_each_s = life.lost_s["lost work"] / len(life.failures)
    assert lost_each_s == pytest.approx(
        10.0, rel=0.1
    )  # half an interval: failures are rarer than checkpoints


def test_uptime_counts_islands_that_run_at_once() -> None:
    lives = [live(Cluster(chips=1000, mtbi_s=1e5), 1e5, np.random.default_rng(s)) for s in range(3)]
    shares = [one.running_s / one.horizon_s for one in lives]
    assert uptime(lives, 1) > max(shares)
    assert uptime(lives, 3) < min(shares)
    assert sum(uptime(lives, k) for k in (1, 2, 3)) == pytest.approx(sum(shares))
