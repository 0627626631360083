"""Random walks of gossip worlds: any method of the family through random faults, by seed.

A seed unfolds into a method, islands, links and a fault plan. A broken invariant is told as the seed and the
fewest faults that still break it.
"""

import random
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import msgspec
import torch

from farflung.chaos.oracle import judge
from farflung.chaos.plan import SYNCER, Fault, Kind
from farflung.core.mixing import MATCHINGS
from farflung.methods import Method, make_method
from farflung.testing.stubs import Broken
from farflung.testing.world import World

LONGEST_S = 300.0  # no walk below needs as much
STORY_LINES = 40
METHODS = ["gasloc", "gasloc", "gasloc", "ld_sgd", "noloco", "ad_psgd", "decentlam", "qg_dsgdm", "gt_dsgdm"]
KINDS: list[Kind] = [
    "kill", "kill", "freeze", "freeze", "slow", "disconnect", "partition", "partition", "delay", "throttle",
    "duplicate", "corrupt", "syncer_loss",
]  # fmt: skip


@dataclass(frozen=True)
class GossipPlan:
    """A seed, unfolded."""

    seed: int
    method: Method
    step_s: list[float]
    budget_tokens: int
    latency_s: float
    slowest_s: float  # of a transfer
    faults: list[Fault]
    poisons: list[tuple[float, int]] = field(default_factory=list)  # (when, whose parameters become NaN)
    hidden: list[str] = field(default_factory=list)
    walls: list[tuple[str, str]] = field(default_factory=list)

    def world(self) -> World:
        draw = random.Random(self.seed + 1)
        world = World(
            self.method, self.step_s, self.budget_tokens, seed=self.seed,
            targets=[float(i) for i in range(len(self.step_s))], latency_s=self.latency_s,
            transfer_s=lambda: draw.uniform(self.slowest_s / 4, self.slowest_s),
            faults=self.faults, hidden=self.hidden, walls=self.walls,
        )  # fmt: skip
        for moment_s, which in self.poisons:
            world.at(moment_s, partial(_poison, world, which))
        return world

    def __str__(self) -> str:
        links = f"latency {self.latency_s}, transfers up to {self.slowest_s}"
        lines = [f"{self.method.policy}", f"steps {self.step_s}, budget {self.budget_tokens}, {links}"]
        for name in ("hidden", "walls", "poisons"):
            lines += [f"{name} {value}"] if (value := getattr(self, name)) else []
        return "\n".join([*lines, *map(str, self.faults)])


def unfold(seed: int) -> GossipPlan:
    """What a seed means."""
    draw = random.Random(seed)
    num = draw.choice([2, 3, 3, 4, 4, 5])
    names = [f"learner-{i}" for i in range(num)]
    step_s = [draw.uniform(0.04, 0.15) for _ in names]
    method = random_method(draw, names)
    steps = draw.randrange(8, 24)  # of each
    usual_s = steps * sum(step_s) / num
    pairs = [(a, b) for a in names for b in names if a < b]
    return GossipPlan(
        seed=seed,
        method=method,
        step_s=step_s,
        budget_tokens=10 * num * steps,
        latency_s=draw.choice([0.001, 0.005, 0.02]),
        slowest_s=draw.choice([0.001, 0.02, 0.2]),
        faults=[random_fault(draw, names, usual_s) for _ in range(draw.choice([0, 1, 2, 3, 5, 7]))],
        poisons=[(draw.uniform(0, usual_s), draw.randrange(num))] if draw.random() < 0.1 else [],
        hidden=[name for name in names if draw.random() < 0.5] if draw.random() < 0.15 else [],
        walls=[pair for pair in pairs if draw.random() < 0.4] if draw.random() < 0.15 else [],
    )


def random_method(draw: random.Random, names: list[str]) -> Method:
    """Any method of the family, matching, overlap and pace of its learners."""
    name = draw.choice(METHODS)
    H = 1 if name in ("ad_psgd",) else draw.choice([1, 2, 2, 3, 4])
    overlap = 1 if name == "ad_psgd" else draw.choice([0, 0, *range(H + 1)])
    options: dict[str, Any] = {
        "matching": draw.choice(["random", "random", "random", *MATCHINGS]),
        "sync_every_steps": H,
        "overlap_steps": overlap,
        "lease_s": draw.choice([0.5, 1.0, 2.0]),
        "gathers": draw.choice([0, 2, 4]),
        "codec": draw.choice(["bf16", "fp32"]),
        "exchange_s": draw.choice([None, None, None, 0.1, 0.5]),
    }
    if draw.random() < 0.3:
        options["local_steps"] = {
            n: draw.randrange(max(1, overlap), H + 3) for n in names if draw.random() < 0.5
        }
    if name == "gasloc":
        options |= {"momentum_on": draw.choice(["local", "mixed"]), "outer_momentum": 0.5, "mixing": 0.5}
    return make_method(name, **options)


def random_fault(draw: random.Random, names: list[str], usual_s: float) -> Fault:
    """Anything that the lab can do to a learner or the hub."""
    kind = draw.choice(KINDS)
    target = SYNCER if kind == "syncer_loss" else draw.choice(names)
    fields: dict[Kind, dict[str, Any]] = {
        "freeze": {"for_s": draw.uniform(0.05, 2.5)},
        "slow": {"for_s": draw.uniform(0.3, 2.0), "factor": draw.uniform(1.5, 5.0)},
        "partition": {"for_s": draw.uniform(0.05, 2.5), "direction": draw.choice(["both", "up", "down"])},
        "delay": {"for_s": draw.uniform(0.3, 2.0), "latency_s": draw.uniform(0.01, 0.3)},
        "throttle": {"for_s": draw.uniform(0.3, 2.0), "mbps": draw.uniform(0.001, 0.01)},
        "duplicate": {"count": draw.randrange(1, 4)},
        "corrupt": {
            "count": draw.randrange(1, 4), "direction": draw.choice(["both", "up", "down"]),
            "what": draw.choice(["chunk", "chunk", "frame"]),
        },
        "syncer_loss": {"for_s": draw.uniform(0.1, 2.0)},
    }  # fmt: skip
    return Fault(kind=kind, target=target, at_s=draw.uniform(0.0, usual_s), **fields.get(kind, {}))


def _poison(world: World, which: int) -> None:
    """A batch makes a learner's parameters NaN."""
    island = world.islands[which]
    if island.alive and island.body is not None:
        with torch.no_grad():
            next(iter(island.body.inner.model.parameters())).fill_(float("nan"))  # type: ignore[attr-defined]


# ---- walking -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """A walk that broke an invariant, with as few faults as could be found."""

    name: str
    detail: str
    plan: GossipPlan
    story: str

    def __str__(self) -> str:
        return f"seed {self.plan.seed}: {self.name}: {self.detail}\n{self.plan}{self.story}"


def attempt(plan: GossipPlan) -> World | Failure:
    """Run a plan to its end."""
    world = plan.world()
    try:
        world.run(until_s=LONGEST_S)
        if world.finished is None:
            raise Broken("no end", f"still {world.syncer.phase} after {LONGEST_S} s")
        verdict = judge(world.tape.records, policy=msgspec.to_builtins(world.syncer.policy))
        if not verdict.ok:
            raise Broken(verdict.findings[0].invariant, str(verdict))
        return world
    except Broken as error:
        name, detail = error.name, str(error)
    except Exception as error:
        name, detail = f"a {type(error).__name__}", repr(error)
    return Failure(name, detail, plan, world.story(STORY_LINES))


def shrink(failure: Failure) -> Failure:
    """Leave out faults and obstacles, one after the other, as long as the same invariant breaks."""
    going = True
    while going:
        going = False
        for less in _less(failure.plan):
            found = attempt(less)
            if isinstance(found, Failure) and found.name == failure.name:
                failure, going = found, True
                break
    return failure


def _less(plan: GossipPlan) -> Iterable[GossipPlan]:
    for name in ("faults", "poisons", "hidden", "walls"):
        items = getattr(plan, name)
        for at in range(len(items)):
            yield replace(plan, **{name: items[:at] + items[at + 1 :]})


def walk_gossip(seed: int) -> World:
    """Walk one seed.

    Raises:
        AssertionError: something that must hold does not; the message has the seed and the shortest story.
    """
    result = attempt(unfold(seed))
    assert not isinstance(result, Failure), str(shrink(result))
    return result


def _range(bounds: tuple[int, int]) -> str | None:
    for seed in range(*bounds):
        result = attempt(unfold(seed))
        if isinstance(result, Failure):
            return str(shrink(result))
    return None


def walk_many_gossip(first: int, last: int, jobs: int = 2, block: int = 100) -> None:
    """Walk the seeds ``first`` to ``last - 1`` in several processes.

    Raises:
        AssertionError: with the seed and the shortest story.
    """
    blocks = [(at, min(at + block, last)) for at in range(first, last, block)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for failure in pool.map(_range, blocks):
            assert failure is None, failure
