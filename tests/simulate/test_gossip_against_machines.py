"""Pairs wait as the real peers do: lapsed leases, deadlines and epochs included."""

import pytest
from real_runs import Downs, real, simulated

from farflung.methods import gasloc

SHORT: Downs = [[(20.3, 28)], [(60, 67)], [], [(85, 94)]]
LONG: Downs = [[(20.3, 38)], [(60, 75)], [], [(85, 100)]]


@pytest.mark.parametrize("downs", [[[], [], [], []], SHORT, LONG])
@pytest.mark.parametrize("slowest_s", [1.0, 1.2])
def test_learners_work_as_much_as_the_real_peers(downs: Downs, slowest_s: float) -> None:
    horizon_s, steps_s = 140.0, [1.0, 1.0, 1.1, slowest_s]
    method = gasloc(sync_every_steps=8)
    world = real(method, steps_s, downs, horizon_s)
    tallies = [simulated(method, steps_s, downs, horizon_s, seed) for seed in range(4)]
    worked_s = sum(m.trained_s for m in world.syncer.membership.members.values())
    assert sum(t.worked_s for t in tallies) / len(tallies) == pytest.approx(worked_s, rel=0.07)


def test_nobody_is_missed_where_nothing_happens() -> None:
    tally = simulated(gasloc(sync_every_steps=8), [1.0] * 4, [[]] * 4, 200.0)
    assert tally.missed == 0
    assert tally.contributions == 2 * tally.merges
