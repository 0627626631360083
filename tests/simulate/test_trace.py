"""Failures as a fault plan: recipes take it, and the machines under it do as the lives say."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from real_runs import worked

from farflung.chaos.plan import Fault
from farflung.errors import UserError
from farflung.lab.start import lab_config, run_lab
from farflung.methods import decoupled
from farflung.recipe import load_recipe, make_recipe
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
    worked_s = worked(world, [0.5] * 3)
    goodput = sum(one.goodput for one in lives) / 3
    assert worked_s / 3 / 80.0 == pytest.approx(goodput, abs=0.04)
    assert goodput < 0.85


def test_one_job_stands_whenever_anybody_does_and_trains_the_same_model() -> None:
    [job], faults = trace.faults_of(MILLION, 3, 200.0, seed=1, reading="job")
    assert {fault.target for fault in faults} == {"learner-0", "learner-1", "learner-2"}
    calm, struck = (reference_run(faults=told) for told in ([], faults))
    stood_s = sum(end - start for start, end in job.downs() if start < struck["wall_s"] - 1)
    assert struck["wall_s"] == pytest.approx(calm["wall_s"] + stood_s, abs=1.0)
    assert struck["digest"] == calm["digest"]
    assert struck["wall_s"] > 1.4 * calm["wall_s"]


def test_an_elastic_group_goes_through_a_trace_of_its_chips() -> None:
    _, faults = trace.faults_of(MILLION, 3, 400.0, seed=1, reading="chips")
    results = reference_run(faults=faults, policy={"elastic": True, "reconfigure_s": 15.0})
    assert results["outcome"] == "finished"
    assert results["rejoins"] > 0


def reference_run(faults: list[Fault], **options: Any) -> dict[str, Any]:
    """Data-parallel training of three learners in the lab, 40 steps of a second."""
    recipe = {
        "method": "data_parallel", "scale": "micro", "num_learners": 3, "steps": 40, "batch_size": 1, "evals": 0,
        "eval_batches": 1, "lab": {"step_s": 1.0, "latency_s": 0.0}, "faults": msgspec.to_builtins(faults),
    }  # fmt: skip
    return run_lab(lab_config(make_recipe(recipe | options)), None)


def test_a_frozen_step_goes_on_where_it_stood() -> None:
    def steps(until_s: float, *freezes: tuple[float, float]) -> int:
        world = World(decoupled(num_fragments=2, sync_every_steps=4), [1.0], 10**9)
        for at_s, for_s in freezes:
            world.at(at_s, lambda for_s=for_s: world.islands[0].freeze(for_s))
        [member] = world.run(until_s).syncer.membership.sorted()
        return member.steps_done

    for begins_s in (2.3, 2.6, 2.9):
        assert [steps(10.0 + t, (begins_s, 5.0)) for t in (0.0, 0.5)] == [steps(5.0 + t) for t in (0.0, 0.5)]
    assert steps(14.5, (2.3, 5.0), (7.5, 4.0)) == steps(5.5)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_time_does_not_run_backwards(scale: float) -> None:
    with pytest.raises(UserError, match="time_scale"):
        trace.plan([], time_scale=scale)


def test_an_unknown_reading_is_refused() -> None:
    with pytest.raises(UserError, match="reading"):
        trace.plan([], "racks")  # type: ignore[arg-type]
