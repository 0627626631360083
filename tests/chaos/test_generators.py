"""Drawn plans: the same for the same seed, and within what was asked for."""

import random

import pytest

from farflung.chaos.generators import (
    GENERATORS,
    Partitions,
    Poisson,
    RegionLoss,
    Stragglers,
    ThrottledLinks,
    arrivals,
    generate,
)

LEARNERS = [f"learner-{i}" for i in range(8)]


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("part", [{"progress": (0.2, 0.6)}, {"seconds": (10.0, 70.0)}])
def test_every_generator_is_a_function_of_its_seed_and_keeps_within_its_part(name, part):
    generator = GENERATORS[name](**part)
    generator.check("here")
    plan = generate([generator], LEARNERS, seed=3)
    assert plan and plan == generate([generator], LEARNERS, seed=3)
    assert any(plan != generate([generator], LEARNERS, seed) for seed in range(4, 8))
    assert generate([GENERATORS[name](seed=3, **part)], LEARNERS, seed=99) == plan
    for fault in plan:
        fault.check("here", LEARNERS)
        at, (start, stop) = (
            (fault.at_s, part["seconds"]) if "seconds" in part else (fault.at_progress, part["progress"])
        )
        assert start <= at <= stop
    moments = [f.at_s if f.at_progress is None else f.at_progress for f in plan]
    assert moments == sorted(moments)


def test_poisson_has_its_rate_and_learners_are_independent():
    plan = generate([Poisson(per_learner=200.0, kinds=("kill", "freeze"))], LEARNERS, seed=1)
    counts = [sum(f.target == name for f in plan) for name in LEARNERS]
    assert all(140 < count < 260 for count in counts)
    assert len(set(counts)) > 3
    assert {f.kind for f in plan} == {"kill", "freeze"}
    assert all((f.for_s is None) == (f.kind == "kill") for f in plan)
    assert arrivals(0.0, random.Random(1)) == []


def test_a_region_is_hit_at_one_moment():
    plan = generate(
        [RegionLoss(num_learners=3, times=2, kind="partition", for_s=(4.0, 9.0))], LEARNERS, seed=1
    )
    by_moment: dict[float, list[str]] = {}
    for fault in plan:
        by_moment.setdefault(fault.at_progress, []).append(fault.target)
        assert 4.0 <= fault.for_s <= 9.0
    assert [len(set(names)) for names in by_moment.values()] == [3, 3]
    assert len({f.for_s for f in plan}) == 2
    assert len(generate([RegionLoss(num_learners=30)], LEARNERS, seed=1)) == 8


def test_stragglers_and_thin_links_are_a_share_of_the_learners():
    slow = generate([Stragglers(share=0.3, factor=(1.2, 1.5))], LEARNERS, seed=1)
    thin = generate([ThrottledLinks(share=1.0, mbps=(2.0, 3.0), seconds=(0.0, 9.0))], LEARNERS, seed=1)
    assert len(slow) == 3 and all(1.2 <= f.factor <= 1.5 and f.at_progress == 0.05 for f in slow)
    assert {f.target for f in thin} == set(LEARNERS)
    assert all(2.0 <= f.mbps <= 3.0 and f.at_s == 0.0 for f in thin)


@pytest.mark.parametrize(("share", "ways"), [(0.0, {"both"}), (1.0, {"up", "down"})])
def test_partitions_are_one_way_as_often_as_asked(share, ways):
    plan = generate([Partitions(per_learner=10.0, one_way=share)], LEARNERS, seed=1)
    assert {f.direction for f in plan} == ways
