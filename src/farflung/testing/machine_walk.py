"""Random fault walks over the machines alone: no tensors, no clock, thousands of disasters a minute.

A walk is a seed. The seed makes a policy, some learners and a script of choices; a choice says what happens
next: a message or a transfer arrives, a step ends, a timer is due, something breaks. After the script the
faults stop, and the world must make progress within a bound. A broken invariant is told as the seed and the
shortest script that still breaks it.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import msgspec

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import messages as msg
from farflung.testing.machine_faults import FAULTS
from farflung.testing.machine_moves import CALM_STEP_S, deliver, ring, turn, work
from farflung.testing.machine_plan import CHOICES, Choice, Plan, unfold
from farflung.testing.machine_world import MachineWorld
from farflung.testing.stubs import Broken

STORY_LINES = 40
SHRINK_TRIES = 400
CALM_LEASES, CALM_STEPS = 12, 80  # of virtual time, within which a world without faults makes progress

MOVES: list[tuple[float, Callable[[MachineWorld, float], bool]]] = [
    (0.62, deliver), (0.80, turn), (0.97, work), (1.0, ring),
]  # fmt: skip


class Walk:
    """One world on its way.

    Args:
        plan: what to do.
        books_every: events between two audits of the ledger.
    """

    def __init__(self, plan: Plan, books_every: int | None = None) -> None:
        self.plan = plan
        self.world = MachineWorld(plan.policy, plan.step_s, plan.budget_tokens, plan.slow_fragment)
        if books_every is not None:
            self.world.checks.books_every = books_every

    def run(self) -> MachineWorld:
        """Raises Broken, or whatever a machine raises."""
        world = self.world
        if self.plan.fair_birth:
            self._calm(lambda: all(p.machine.phase == "training" for p in world.processes))
        risk = self.plan.risk
        for at, (kind, which, how) in enumerate(self.plan.script):
            if world.finished == "finished":
                break
            if world.finished is not None:
                if world.durable is None:
                    break
                world.resume()
            elif kind < risk:
                FAULTS[int(kind / risk * len(FAULTS))](world, which, how, at / CHOICES)
            else:
                self._move((kind - risk) / (1 - risk), which)
        self._recover()
        return world

    def _move(self, kind: float, which: float) -> None:
        """The move that was drawn, or else the next one that there is."""
        first = next(i for i, (share, _) in enumerate(MOVES) if kind < share)
        for i in range(len(MOVES)):
            if MOVES[(first + i) % len(MOVES)][1](self.world, which):
                return

    # ---- no more faults ------------------------------------------------------------------------------

    def _recover(self) -> None:
        """While K learners live, versions grow within a bound; a run that is ending ends."""
        world = self.world
        if world.finished == "suspended" and world.durable is not None:
            world.resume()
        if world.finished is None:
            before = list(world.hub.versions)
            ending = ("finishing", "handing_in", "suspending")
            if world.syncer.phase not in ending:
                self._calm(
                    lambda: (
                        world.syncer.phase in ending
                        or any(v > b for v, b in zip(world.hub.versions, before, strict=True))
                    )
                )
            if self.plan.ends or world.syncer.phase in ending:
                self._end()
        world.checks.audit()
        if world.finished == "finished" and (left := world.syncer.ledger.in_flight):
            raise Broken("a token has no fate", f"{left} in flight after the end")

    def _end(self) -> None:
        if self.world.syncer.phase in ("birth", "training"):
            self.world.take(ev.StopRequested(mode="finish"))
        self._calm(lambda: self.world.finished is not None)

    def _calm(self, reached: Callable[[], bool]) -> None:
        """Everything that is asked for is done, in order, until this is reached."""
        world = self.world
        until_s = world.now + CALM_LEASES * self.plan.policy.lease_s + CALM_STEPS * max(self.plan.step_s)
        while not reached() and world.finished is None:
            if world.now > until_s:
                raise Broken(
                    "no progress", f"none within {until_s:.1f} s, the syncer is {world.syncer.phase}"
                )
            for process in world.processes:
                if not process.alive and (process.ended is None or not process.ended.ok):
                    process.start()
            world.go_on()
            busy = False
            for process in world.processes:
                if process.may_turn():
                    turn(world, 0.0, process)
                    busy = True
            while world.now <= until_s and (deliver(world, 0.0) or work(world, 0.0)):
                busy = True
            world.now += CALM_STEP_S if busy else 0.0
            ring(world, 0.0, due_only=busy)


@dataclass(frozen=True)
class Failure:
    """A walk that broke an invariant, as short as it could be made."""

    seed: int
    name: str
    detail: str
    script: list[Choice]
    plan: Plan
    story: list[str]

    def __str__(self) -> str:
        head = f"seed {self.seed}: {self.name}: {self.detail}\n{self.plan.policy}"
        kept = f"{len(self.script)} of {len(self.plan.script)} choices are enough; the end of the story:"
        return "\n".join([head, kept, *self.story])


def attempt(plan: Plan, books_every: int | None = None) -> tuple[str, str, MachineWorld] | MachineWorld:
    """Run a plan: the world, or the name and detail of what broke and the world in which it did."""
    walk = Walk(plan, books_every)
    try:
        return walk.run()
    except Broken as error:
        return error.name, str(error), walk.world
    except Exception as error:
        return f"a machine raised {type(error).__name__}", repr(error), walk.world


def walk_machines(seed: int, choices: int = CHOICES) -> Failure | int:
    """Walk one seed; the number of machine events, or what broke."""
    plan = unfold(seed, choices)
    result = attempt(plan)
    if isinstance(result, MachineWorld):
        return result.events
    return shrink(seed, plan, result[0])


def shrink(seed: int, plan: Plan, name: str) -> Failure:
    """Leave out choices, as long as the same invariant breaks."""

    def breaks(script: Sequence[Choice]) -> tuple[str, str, MachineWorld] | None:
        result = attempt(replace(plan, script=list(script)), books_every=1)
        return result if not isinstance(result, MachineWorld) and result[0] == name else None

    script, tries = list(plan.script), 0
    size = len(script) // 2
    while size and tries < SHRINK_TRIES:
        start = len(script)
        while start > 0 and tries < SHRINK_TRIES:
            shorter = script[: max(0, start - size)] + script[start:]
            tries += 1
            if breaks(shorter):
                script = shorter
            start -= size
        size //= 2
    found = breaks(script) or attempt(plan)
    assert not isinstance(found, MachineWorld)
    return Failure(seed, name, found[1], script, plan, story(found[2]))


def story(world: MachineWorld, last: int = STORY_LINES) -> list[str]:
    """The end of what happened, one line an event or action, without the ticking of clocks."""
    lines: list[str] = []
    for now, node, event, actions in reversed(world.log):
        told = [action for action in actions if type(action) is not act.SetTimer]
        if isinstance(event, ev.TimerFired) and all(_ticks(action) for action in told):
            continue
        if isinstance(event, ev.MessageArrived) and isinstance(event.message, msg.Heartbeat):
            continue
        after = [f"{'':8} {node:7}     {msgspec.to_builtins(action)}" for action in told]
        lines = [f"{now:8.3f} {node:7} {msgspec.to_builtins(event)}", *after, *lines]
        if len(lines) >= last:
            break
    return lines[-last:]


def _ticks(action: object) -> bool:
    heard = isinstance(action, act.Say) and isinstance(action.message, msg.Heartbeat)
    return heard or (isinstance(action, act.Note) and action.kind == "waiting")


# ---- many seeds ----------------------------------------------------------------------------------------


def first_failure(seeds: Iterable[int]) -> tuple[int, Failure | None]:
    """Walk seeds until one breaks; the number of machine events, and what broke."""
    events = 0
    for seed in seeds:
        result = walk_machines(seed)
        if isinstance(result, Failure):
            return events, result
        events += result
    return events, None


def _range(bounds: tuple[int, int]) -> tuple[int, str | None]:
    events, failure = first_failure(range(*bounds))
    return events, None if failure is None else str(failure)


def walk_many(first: int, last: int, jobs: int = 2, block: int = 500) -> int:
    """Walk the seeds ``first`` to ``last - 1`` in several processes; the number of machine events.

    Raises:
        AssertionError: with the seed and the shortest story.
    """
    blocks = [(at, min(at + block, last)) for at in range(first, last, block)]
    events = 0
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for number, failure in pool.map(_range, blocks):
            assert failure is None, failure
            events += number
    return events
