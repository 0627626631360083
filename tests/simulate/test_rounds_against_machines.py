"""The simulation's rounds are those of SyncerMachine and LearnerMachine: same merges, same breadth, same steps."""

from typing import Any

import pytest
from real_runs import Downs, real, simulated

from farflung.methods import METHODS

UNEVEN = [1.0, 1.05, 1.1, 1.37]
CALM: Downs = [[], [], [], []]
SHORT: Downs = [[(20.3, 28)], [(60, 67)], [], [(45, 54)]]  # no lease runs out
LONG: Downs = [[(20.3, 40)], [(45, 64)], [], [(25, 33), (70, 74)]]
FREE: dict[str, Any] = {"num_fragments": 4, "sync_every_steps": 4}
LED = {**FREE, "quorum": 4, "max_lead_steps": 2}
TURNS = {"sync_every_steps": 20, "overlap_steps": 3}


@pytest.mark.parametrize(
    ("method", "options", "downs"),
    [
        ("decoupled", FREE, CALM),
        ("decoupled", FREE, LONG),
        ("decoupled", {**FREE, "grace_gamma": 0.0}, LONG),
        ("decoupled", LED, CALM),
        ("decoupled", {**LED, "quorum": 3}, LONG),
        ("diloco", {"sync_every_steps": 20}, CALM),
        ("diloco", {"sync_every_steps": 20}, SHORT),
        ("diloco", {"sync_every_steps": 20}, LONG),
        ("streaming", TURNS, CALM),
        ("streaming", TURNS, SHORT),
        ("streaming", TURNS, LONG),
    ],
)
def test_rounds_are_those_of_the_real_machines(method: str, options: dict[str, Any], downs: Downs) -> None:
    horizon_s = 90.0
    made = METHODS[method](**options)
    world, tally = real(made, UNEVEN, downs, horizon_s), simulated(made, UNEVEN, downs, horizon_s)
    hub, P = world.syncer, made.policy.num_fragments
    members = hub.membership.members.values()
    assert tally.merges == pytest.approx(sum(hub.merging.versions), abs=1 + 0.02 * tally.merges)
    assert tally.contributions == pytest.approx(sum(m.merged for m in members), rel=0.06)
    assert tally.steps == pytest.approx(sum(m.steps_done for m in members), rel=0.03)
    assert tally.merged_steps == pytest.approx(hub.ledger.merged / world.tokens_per_step / P, rel=0.04)


REBASED = {**FREE, "adoption": "rebase"}


@pytest.mark.parametrize(
    ("options", "fetch_s"), [(FREE, 3.0), (FREE, 12.0), (REBASED, 3.0), (REBASED, 12.0), (LED, 3.0)]
)
def test_merged_work_is_counted_once_where_downlinks_are_saturated(
    options: dict[str, Any], fetch_s: float
) -> None:
    """Four fragments a round of four steps would want four fetches in some 4 s."""
    horizon_s = 300.0
    made = METHODS["decoupled"](**options)
    world = real(made, UNEVEN, CALM, horizon_s, fetch_s)
    tally = simulated(made, UNEVEN, CALM, horizon_s, fetch_s=fetch_s)
    hub, P = world.syncer, made.policy.num_fragments
    members = hub.membership.members.values()
    assert tally.merged_steps <= tally.steps
    assert tally.merges == pytest.approx(sum(hub.merging.versions), rel=0.03)
    assert tally.contributions == pytest.approx(sum(m.merged for m in members), rel=0.03)
    assert tally.steps == pytest.approx(sum(m.steps_done for m in members), rel=0.03)
    assert tally.merged_steps == pytest.approx(hub.ledger.merged / world.tokens_per_step / P, rel=0.03)
