"""A killed and restarted learner gets everything back, and sends only what it trained itself (P2)."""

import pytest
import torch
from torch import Tensor

from farflung.core.merge import Segment
from farflung.core.merge import merge as merged
from farflung.core.vectors import gather, live_tensors
from farflung.lab.island import VirtualIsland
from farflung.methods import decoupled
from farflung.protocol import objects
from farflung.testing import World, quadratic_model
from farflung.testing.quadratic import lr_after, pull_

KILLED_S, STARTED_S = 3.05, 3.95
TARGETS = [3.0, -5.0]  # the donor pulls one way, the joiner the other


@pytest.fixture(scope="module")
def world() -> World:
    outer = {"outer": "sgd", "outer_momentum": 0.0, "anchor": "base"}
    method = decoupled(num_fragments=2, sync_every_steps=4, overlap_steps=1, lease_s=2.0, **outer)
    world = World(method, [0.1, 0.1], 2000, targets=TARGETS)
    joiner = world.islands[1]
    world.at(KILLED_S, joiner.kill)
    world.at(STARTED_S, joiner.start)
    return world.run()


def proof(world: World) -> dict:
    (found,) = [p for p in world.tape.notes("rejoin_proved") if p["role"] == "rejoin"]
    return found


def joiners_reports(world: World, kind: str) -> list[dict]:
    """What the trainer of the second process reported."""
    reports = [r.data["report"] for r in world.tape.of("learner-1.2") if r.type == "Reported"]
    return [r for r in reports if r["type"] == kind]


def test_everything_is_proven_equal_on_the_tape(world: World) -> None:
    equal = {name: value for name, value in proof(world).items() if name.endswith("_equal")}
    assert len(equal) == 4
    assert all(equal.values()), world.story()
    assert world.syncer.admission.rejoins == 1


def test_the_donor_is_the_healthy_learner(world: World) -> None:
    assert (proof(world)["donor"], proof(world)["state"]) == ("learner-0", "warm")


def test_the_parameters_are_the_syncers(world: World) -> None:
    merges = {
        (r.data["fragment"], r.data["version"]): r.data["digest"]
        for r in world.tape.of("syncer")
        if r.type == "MergeDone"
    }
    wanted = [merges[p, v] for p, v in enumerate(proof(world)["versions"])]
    assert proof(world)["params_digests"] == wanted


def test_the_cursor_is_the_learners_own(world: World) -> None:
    """One batch a step: the data go on where the dead process was last heard of."""
    reported = [
        r.data["message"]["cursor"]
        for r in world.tape.of("syncer")
        if r.type == "MessageArrived" and r.data["message"]["type"] == "Boundary" and r.t <= KILLED_S
        if r.data["connection"] == 2
    ]
    (loaded,) = joiners_reports(world, "Loaded")
    assert loaded["cursor"] == reported[-1] == proof(world)["cursor"]


def test_the_inner_state_and_learning_rate_are_the_donors(world: World) -> None:
    (loaded,) = joiners_reports(world, "Loaded")
    donated = [r.data["report"] for r in world.tape.of("learner-0") if r.type == "Reported"]
    (donated,) = [r for r in donated if r["type"] == "Donated"]
    assert loaded["inner_digest"] == donated["digest"]
    assert loaded["lr"] == donated["lr"]
    assert donated["step"] > 25  # the donor went on while the other was away


def first_delta(world: World) -> tuple[dict, dict, Tensor]:
    """The joiner's first contribution: its snapshot, what it had loaded, and the bytes it sent."""
    (loaded,) = joiners_reports(world, "Loaded")
    taken = next(t for b in joiners_reports(world, "BoundaryPassed") for t in b["taken"])
    name = objects.contribution("learner-1", 2, taken["fragment"], taken["round"])
    return taken, loaded, torch.frombuffer(bytearray(world.uploads[name]), dtype=torch.float32)


def version_bits(world: World, fragment: int, version: int) -> Tensor:
    """A version, made again from every merge up to it: versions that nobody holds are not kept."""
    theta = gather(live_tensors(quadratic_model()), world.plan.fragments[fragment].pieces).clone()
    outer, state = world.method.outer, world.method.outer.init(theta)
    for record in world.tape.of("syncer"):
        if (
            record.type == "Merge"
            and record.data["fragment"] == fragment
            and record.data["version"] <= version
        ):
            theta, state = merge_again(world, record.data, theta, outer, state)
    return theta


def merge_again(world: World, merge: dict, theta: Tensor, outer, state) -> tuple:  # type: ignore[no-untyped-def]

    parts = merge["parts"]
    deltas = [torch.frombuffer(bytearray(world.uploads[p["object"]]), dtype=torch.float32) for p in parts]
    pieces = world.plan.fragments[merge["fragment"]].pieces
    segments = [Segment(start=p.offset, stop=p.offset + p.length, rule="rda") for p in pieces]
    return outer.update(merged(deltas, [p["weight"] for p in parts], segments), theta, state)


def test_the_first_delta_is_own_work_only(world: World) -> None:
    """Exactly what its own steps did to the version it installed: nothing of the donor's work is in it."""
    taken, loaded, sent = first_delta(world)
    fragment, steps = taken["fragment"], taken["steps"]
    assert taken["base_version"] == loaded["versions"][fragment], "the transcription below starts there"
    base = version_bits(world, fragment, taken["base_version"])
    x = base.clone()
    donors_steps = round((lr_after(0) / loaded["lr"] - 1) * 100)  # the schedule goes on where the donor's was
    for step in range(steps):
        pull_(x, TARGETS[1], lr_after(donors_steps + step + 1))
    assert torch.equal(sent, base - x), world.story()
    assert taken["tokens"] == 10 * steps


def test_the_first_delta_would_be_another_with_the_donors_work_in_it(world: World) -> None:
    """The same arithmetic from where the donor stood tells the two apart: the targets differ."""
    taken, _, sent = first_delta(world)
    base = version_bits(world, taken["fragment"], taken["base_version"])
    assert (sent * (base - TARGETS[1])).min() > 0  # every element moved towards the joiner's own target
    assert (base < TARGETS[0]).all()  # ... which is away from the donor's


def test_a_joiner_on_a_slow_line_finds_its_versions_however_long_it_takes() -> None:
    """Rounds go on meanwhile, and the versions that it was told to install are old ones by then."""
    method = decoupled(num_fragments=2, sync_every_steps=4, overlap_steps=1, lease_s=2.0)
    world = World(method, [0.1, 0.1, 0.1], 2000)
    joiner = world.islands[2]

    def slow_s(island: VirtualIsland, direction: str, num_bytes: int) -> float:
        return 2.5 if (island, joiner.generation) == (joiner, 2) else 0.02  # six cycles

    world.transfer_s = slow_s
    world.at(KILLED_S, joiner.kill)
    world.at(STARTED_S, joiner.start)
    world.run()
    assert not world.tape.notes("start_over"), world.story()
    (proved,) = [p for p in world.tape.notes("rejoin_proved") if p["role"] == "rejoin"]
    records = world.tape.records
    installed = next(
        i for i, r in enumerate(records) if r.node == "learner-2.2" and "Installed" in str(r.data)
    )
    newest = {r.data["fragment"]: r.data["version"] for r in records[:installed] if r.type == "MergeDone"}
    assert all(newest[p] > old + method.policy.versions_kept for p, old in enumerate(proved["versions"]))
    world.syncer.validate()
