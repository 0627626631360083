"""The real machines under virtual time beside the simulation's rounds: the same steps, links and standstills."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from farflung.lab.island import VirtualIsland
from farflung.methods import Method
from farflung.simulate.cluster import Cluster
from farflung.simulate.gossip import GossipRun
from farflung.simulate.rounds import HubRun, Tally
from farflung.simulate.scenario import Links, Scenario
from farflung.simulate.timeline import Timeline
from farflung.testing.world import MERGE_S, World

LATENCY_S, TRANSFER_S = 0.01, 0.02
PARAMS = 1e6
BIRTH_S = 0.9  # less than a step

Downs = Sequence[Sequence[tuple[float, float]]]


def real(
    method: Method, steps_s: Sequence[float], downs: Downs, horizon_s: float, fetch_s: float = 0.0
) -> World:
    """Syncer and learner machines, hub and trainers; an island that does not run is frozen.

    A learner's downloads after its birth come one behind the other, `fetch_s` each.
    """
    world = World(method, steps_s, 10**9, latency_s=LATENCY_S, transfer_s=TRANSFER_S)
    if fetch_s:
        free_s: dict[str, float] = {}

        def transfer_s(island: VirtualIsland, direction: str, num_bytes: int) -> float:
            if direction == "up" or world.now < BIRTH_S:
                return TRANSFER_S
            free_s[island.name] = max(world.now, free_s.get(island.name, 0.0)) + fetch_s
            return free_s[island.name] - world.now + TRANSFER_S

        world.transfer_s = transfer_s
    for island, own in zip(world.islands, downs, strict=True):
        for start_s, end_s in own:
            world.at(start_s, lambda island=island, for_s=end_s - start_s: island.freeze(for_s))
    return world.run(horizon_s)


def worked(world: World, steps_s: Sequence[float]) -> float:
    """Seconds in steps, of all learners; what a step says that it took holds the standstill that it spanned."""
    members = world.syncer.membership.sorted()
    return sum(m.steps_done * step_s for m, step_s in zip(members, steps_s, strict=True))


def simulated(
    method: Method,
    steps_s: Sequence[float],
    downs: Downs,
    horizon_s: float,
    seed: int = 0,
    fetch_s: float = 0.0,
) -> Tally:
    """The same by the simulation."""
    M, policy = len(steps_s), method.policy
    gossip = policy.topology == "gossip"
    scenario = Scenario(
        method=policy.method, learners=M, cluster=Cluster(chips=M, mtbi_s=math.inf), policy=policy,
        links=Links(latency_s=LATENCY_S + TRANSFER_S if gossip else LATENCY_S + TRANSFER_S / 2, merge_s=MERGE_S),
    )  # fmt: skip
    if fetch_s:
        scenario = replace(scenario, links=replace(scenario.links, params=PARAMS))
        mbps = 8 * scenario.down_bytes() / fetch_s / 1e6
        scenario = replace(scenario, links=replace(scenario.links, down_mbps=mbps))
    clocks = [
        Timeline(list(zip([0.0, *(b for _, b in own)], [*(a for a, _ in own), 2 * horizon_s], strict=True)))
        for own in downs
    ]
    rng = np.random.default_rng(0)
    if gossip:
        return GossipRun(scenario, clocks, horizon_s, rng, list(steps_s), seed=seed).run()
    return HubRun(scenario, clocks, horizon_s, rng, list(steps_s)).run()
