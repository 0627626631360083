"""Delays have the mean and shape they say; outages strike who stands in the domain."""

import numpy as np
import pytest

from farflung.errors import UserError
from farflung.simulate.cluster import Burst, Cluster, Outage
from farflung.simulate.outages import overlap, strikes
from farflung.simulate.returns import Returns


@pytest.mark.parametrize(("shape", "exponent"), [(1.0, 1.0), (0.7, 2.0), (2.0, 0.5), (0.5, 3.0)])
def test_drawn_delays_have_the_mean_of_the_formula(shape: float, exponent: float) -> None:
    returns = Returns.of_mean(60.0, shape, exponent)
    drawn = returns.draw(np.random.default_rng(0), 200_000)
    assert returns.mean_s == pytest.approx(60.0, rel=1e-3)
    assert drawn.mean() == pytest.approx(60.0, rel=0.03)
    at = np.median(drawn) / returns.scale_s
    assert (1 - np.exp(-(at**shape))) ** exponent == pytest.approx(0.5, abs=0.01)


def test_an_outage_strikes_the_islands_of_its_domain_at_one_moment() -> None:
    region = Outage(name="region", num_domains=4, mtbi_s=1e5, lasts=Returns(scale_s=100.0))
    found = strikes(Cluster(chips=800, outages=(region,)), 8, 1e6, np.random.default_rng(0))
    assert all(found[2 * i] == found[2 * i + 1] for i in range(4))
    assert found[0] != found[2]
    assert {strike.share for own in found for strike in own} == {1.0}


def test_every_chip_lies_in_one_domain() -> None:
    for islands in (1, 3, 8):
        for island in range(islands):
            assert sum(overlap(island, islands, d, 5) for d in range(5)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Returns(scale_s=0.0),
        lambda: Returns.of_mean(-1.0),
        lambda: Cluster(chips=0),
        lambda: Cluster(chips=1, mtbi_s=-1.0),
        lambda: Cluster(chips=1, down_s=-1.0),
        lambda: Cluster(chips=1, checkpoint_cost_s=1.0),
        lambda: Cluster(chips=4).island(5),
        lambda: Burst(name="x", chips=0, mtbi_s=1.0),
        lambda: Outage(name="x", num_domains=1, mtbi_s=0.0, lasts=Returns(scale_s=1.0)),
    ],
)
def test_what_cannot_be_is_refused(wrong: object) -> None:
    with pytest.raises(UserError):
        wrong()  # type: ignore[operator]
