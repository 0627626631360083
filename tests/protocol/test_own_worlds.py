"""Whole runs of methods with own state, with deaths: what was kept is what is gone on with, bit for bit."""

import random

import msgspec
import pytest

from farflung.chaos.oracle import judge
from farflung.chaos.plan import Fault
from farflung.lab.body import LocalBody
from farflung.methods import Method, dct_momentum, gasloc, sparseloco
from farflung.testing import World
from farflung.testing.walk import check

H = 4
HUB = {"sync_every_steps": H, "lease_s": 2.0, "codec": "top1-fp32-u16-chunk8"}
GOSSIP = {"sync_every_steps": H, "lease_s": 2.0, "gathers": 2}
METHODS: dict[str, Method] = {
    "sparseloco": sparseloco(**HUB),
    "sparseloco, free": sparseloco(
        pace="free", quorum=1, num_fragments=2, overlap_steps=1, **HUB
    ),
    "dct_momentum": dct_momentum(codec="dct-top2-fp32-u16-chunk64", outer_lr=0.3, **GOSSIP),
    "dct_momentum, dense": dct_momentum(
        codec="dct-top2-fp32-u16-chunk64", outer_lr=0.3, dense_every_rounds=3, **GOSSIP
    ),
    "gasloc": gasloc(momentum_on="local", mixing=0.3, outer_momentum=0.5, codec="fp32", **GOSSIP),
}  # fmt: skip


def run(name: str, seed: int, kills: int = 1) -> World:
    """Three learners that pull in different directions, one of whom is killed now and then."""
    draw = random.Random(seed)
    faults = [
        Fault(kind="kill", target="learner-1", at_progress=draw.uniform(0.2, 0.7)) for _ in range(kills)
    ]
    return World(
        METHODS[name], [0.1, 0.11, 0.13], 2400, seed=seed, targets=[3.0, -5.0, 1.0], faults=faults,
        restart_s=draw.uniform(0.1, 3.0),
    ).run(until_s=600.0)  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", METHODS)
def test_a_killed_learner_goes_on_with_its_own_state(name: str, seed: int) -> None:
    world = run(name, seed)
    assert world.finished == "finished", world.story()
    for note in world.tape.notes("own_state"):
        assert note["taken"] == "own" or note["reason"] == "undecided", world.story()
        assert note["taken"] == "zero" or note["age_steps"] <= H
    assert len(world.tape.notes("own_state")) == 1, world.story()
    verdict = judge(world.tape.records, policy=msgspec.to_builtins(world.syncer.policy))
    assert verdict.ok, str(verdict)
    if world.checks is None:
        check(world)


@pytest.mark.parametrize("name", METHODS)
def test_a_learner_that_dies_twice_finds_it_again(name: str) -> None:
    world = World(METHODS[name], [0.1, 0.11, 0.13], 2400, targets=[3.0, -5.0, 1.0])
    for kill_s in (3.05, 4.6):
        world.at(kill_s, world.islands[1].kill)
        world.at(kill_s + 0.9, world.islands[1].start)
    world.run(until_s=600.0)
    notes = world.tape.notes("own_state")
    assert len(notes) == 2 and notes[-1]["incarnation"] >= 3, world.story()  # one may start over on its way
    assert all(n["taken"] == "own" or n["reason"] == "undecided" for n in notes)


def test_points_are_together_after_dense_rounds_only() -> None:
    distances = {}
    for name in ("dct_momentum", "dct_momentum, dense"):
        world = run(name, 0, kills=0)
        distances[name] = min(n["distance"] for n in world.tape.notes("consensus"))
    assert distances["dct_momentum, dense"] < distances["dct_momentum"] / 10, distances


def test_bytes_of_a_dense_round_are_counted() -> None:
    """With three learners a round is six vectors: two rounds in three are sparse ones."""
    moved = {
        name: run(name, 0, kills=0).bytes_moved["up"] for name in ("dct_momentum", "dct_momentum, dense")
    }
    assert moved["dct_momentum, dense"] > moved["dct_momentum"]


def test_a_disk_that_is_lost_with_its_machine_begins_at_zero() -> None:
    world = World(METHODS["sparseloco"], [0.1, 0.11], 1500, targets=[3.0, -5.0])
    island = world.islands[1]

    def move() -> None:
        assert isinstance(island.body, LocalBody)
        island.body.disk = None
        island.start()

    world.at(3.05, island.kill)
    world.at(4.0, move)
    world.run(until_s=600.0)
    (note,) = world.tape.notes("own_state")
    assert (note["taken"], note["reason"]) == ("zero", "missing"), world.story()
