"""Random walks: worlds of any method with random faults, and what must hold of every one of them."""

import random
from typing import Any

import msgspec

from farflung.chaos.oracle import judge
from farflung.lab.island import VirtualIsland
from farflung.methods import Method, decoupled, diloco, streaming
from farflung.protocol import events as ev
from farflung.testing.world import World

LONGEST_S = 600.0  # no walk below needs as much


def random_method(draw: random.Random) -> Method:
    """Any method of the hub family, any adoption, quorum and schedule that its policy allows."""
    P, H = draw.choice([(1, 4), (2, 4), (4, 8), (3, 10)])
    times: dict[str, Any] = {
        "sync_every_steps": H,
        "lease_s": draw.choice([0.5, 1.0, 3.0]),
        "final": draw.choice(["average", "average", "outer", "none"]),
    }
    parts = {"num_fragments": P, "overlap_steps": draw.randrange(min(3, H))}
    kind = draw.choice(["overwrite", "rebase", "mix", "diloco", "streaming"])
    if kind == "diloco":
        return diloco(quorum=draw.choice(["all", 2, 3]), **times)
    if kind == "streaming":
        return streaming(quorum=draw.choice(["all", 2]), **parts, **times)
    own = {"mix_alpha": 0.5} if kind == "mix" else {}
    lead = {"max_lead_steps": 4 * H} if draw.random() < 0.2 else {}
    choices = {
        "quorum": draw.choice([1, 1, 2, "all"]),
        "anchor": draw.choice(["present", "base"]),
        "throttle": draw.random() < 0.8,
    }
    return decoupled(adoption=kind, **choices, **parts, **times, **own, **lead)


def random_world(seed: int) -> World:
    """Three or four islands, up to seven faults: kills with a restart, freezes, cut links; or a suspend."""
    draw = random.Random(seed)
    slowest_s, jitter = draw.choice([0.001, 0.02, 0.2, 0.5]), random.Random(seed + 1)
    world = World(
        random_method(draw),
        [draw.uniform(0.05, 0.2) for _ in range(draw.choice([3, 3, 4]))],
        draw.choice([600, 1500, 3000]),
        seed=seed,
        latency_s=draw.choice([0.001, 0.01, 0.05]),
        transfer_s=lambda: jitter.uniform(slowest_s / 4, slowest_s),
    )
    moment_s = 0.0
    for _ in range(draw.randrange(8)):
        moment_s += draw.uniform(0.2, 4)
        plan_fault(world, moment_s, draw.choice(world.islands), draw)
    if draw.random() < 0.15:
        world.at(draw.uniform(0, 10), lambda: world.take(ev.StopRequested(mode="suspend")))
    return world


def plan_fault(world: World, moment_s: float, island: VirtualIsland, draw: random.Random) -> None:
    """One fault of a random kind at this moment."""
    kind = draw.choice(["kill", "freeze", "cut"])
    if kind == "kill":
        world.at(moment_s, island.kill)
        world.at(moment_s + draw.uniform(0.1, 3), lambda: None if island.alive else island.start())
    elif kind == "freeze":
        for_s = draw.uniform(0.1, 5)
        world.at(moment_s, lambda: island.freeze(for_s))
    else:
        world.at(moment_s, island.cut)


def walk(seed: int) -> World:
    """Run a random world to its end and check it.

    Raises:
        AssertionError: something that must hold does not; the message has the seed, the method and the story.
    """
    world = random_world(seed)
    try:
        world.run(until_s=LONGEST_S)
        assert world.finished is not None, f"still {world.syncer.phase} after {LONGEST_S} s"
        check(world)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}\n{world.method.policy}{world.story()}") from error
    return world


def check(world: World) -> None:
    """Everything that must hold of a finished world.

    Raises:
        AssertionError: with one line.
    """
    ledger = world.syncer.ledger
    ledger.validate()
    if world.finished == "finished":
        assert ledger.in_flight == 0, f"in flight after the end: {ledger.summary()}"
    alarms = [note for note in world.tape.notes("alarm") if note["what"] != "narrow_merges"]  # those may be
    assert not alarms, f"alarms: {alarms}"
    for proof in world.tape.notes("rejoin_proved"):
        assert all(equal for name, equal in proof.items() if name.endswith("_equal")), f"not equal: {proof}"
    merged = sum(note["tokens"] for note in world.tape.notes("merged"))
    assert ledger.merged == merged, f"the ledger merged {ledger.merged}, the rounds {merged}"
    verdict = judge(world.tape.records, policy=msgspec.to_builtins(world.syncer.policy))
    assert verdict.ok, str(verdict)
