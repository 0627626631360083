"""Failures as a fault plan: recipes take it, and the machines under it do as the lives say."""

import tomllib
from pathlib import Path

import pytest

from farflung.errors import UserError
from farflung.methods import decoupled
from farflung.recipe import load_recipe
from farflung.simulate import trace
from farflung.simulate.cluster import Cluster
from farflung.testing.world import World

MILLION = Cluster(chips=1_200_000)


@pytest.mark.parametrize("reading", trace.READINGS)
def test_a_recipe_takes_the_plan(tmp_path: Path, reading: trace.Reading) -> None:
    faults = trace.plan(trace.lives(MILLION, 4, 300.0, seed=1), reading, time_scale=0.1)
    trace.write(tmp_path / "plan.toml", faults, "a million chips")
    (tmp_path / "run.toml").write_text('num_learners = 4\nfaults = "plan.toml"\n')
    assert load_recipe(tmp_path / "run.toml", []).plan() == faults
    assert len(faults) > 3


def test_an_empty_plan_is_a_plan(tmp_path: Path) -> None:
    trace.write(tmp_path / "plan.toml", [], "nothing happens")
    assert tomllib.loads((tmp_path / "plan.toml").read_text()) == {"faults": []}


def test_the_same_seed_gives_the_same_plan() -> None:
    plans = [trace.plan(trace.lives(MILLION, 4, 500.0, seed)) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


def test_the_real_machines_under_the_plan_have_the_goodput_of_the_lives() -> None:
    lives = trace.lives(Cluster(chips=2_400_000), 3, 160.0, seed=3)
    faults = trace.plan(lives, time_scale=0.5)
    world = World(decoupled(num_fragments=2, sync_every_steps=4), [0.5] * 3, 10**9)
    for fault in faults:
        island = world.island(fault.target)
        world.at(fault.at_s or 0.0, lambda island=island, for_s=fault.for_s or 0.0: island.freeze(for_s))
    world.run(80.0)
    worked_s = sum(m.trained_s for m in world.syncer.membership.members.values())
    goodput = sum(one.goodput for one in lives) / 3
    assert worked_s / 3 / 80.0 == pytest.approx(goodput, abs=0.04)
    assert goodput < 0.85


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_time_does_not_run_backwards(scale: float) -> None:
    with pytest.raises(UserError, match="time_scale"):
        trace.plan([], time_scale=scale)


def test_an_unknown_reading_is_refused() -> None:
    with pytest.raises(UserError, match="reading"):
        trace.plan([], "racks")  # type: ignore[arg-type]
