"""What can happen next in a world of machines when nothing breaks. Each move says whether there was one.

`which` in [0, 1) chooses among the candidates; time goes on a little with each.
"""

from math import inf
from typing import Any

from farflung.protocol import events as ev
from farflung.testing.machine_process import Process
from farflung.testing.machine_world import MachineWorld

MESSAGE_S = 0.002  # between two moves that are no step
CALM_STEP_S = 0.1  # in calm, between two boundaries of everybody


def deliver(world: MachineWorld, which: float) -> bool:
    """The next message of one of the queues arrives."""
    found: list[tuple[int, Any]] = []
    for link in world.links:
        if link.up and world.finished is None:
            found.append((0, link))
        if link.down and not link.process.frozen:
            found.append((1, link))
    for process in world.processes:
        if process.alive and not process.frozen and process.trainer.reports:
            found.append((2, process))
    if not found:
        return False
    world.now += MESSAGE_S
    kind, source = found[int(which * len(found))]
    if kind == 0:
        world.deliver_up(source)
    elif kind == 1:
        world.deliver_down(source)
    else:
        world.feed(source, ev.Reported(report=source.trainer.reports.popleft()))
    return True


def turn(world: MachineWorld, which: float, process: Process | None = None) -> bool:
    """A step ends, or a trainer that waits looks into its mailbox."""
    if process is None:
        found = [p for p in world.processes if p.may_turn()]
        if not found:
            return False
        process = found[int(which * len(found))]
        world.now += process.step_s / len(world.processes)
    process.turn()
    return True


def work(world: MachineWorld, which: float) -> bool:
    """A transfer, a merge, a dial or a checkpoint is complete."""
    found: list[tuple[Process | None, int]] = []
    for process in world.processes:
        if process.alive and not process.frozen and process.jobs and world.finished is None:
            found += [(process, i) for i in range(len(process.jobs))]
    if world.finished is None:
        found += [(None, i) for i in range(len(world.merges) + world.checkpoint)]
    if not found:
        return False
    world.now += MESSAGE_S
    newest = len(found) - 1 - int(which * which * len(found))  # likely a late one, so that some wait long
    owner, index = found[newest if which else 0]
    if owner is not None:
        world.work(owner, index)
    elif index < len(world.merges):
        world.merge_done(index)
    else:
        world.checkpoint_done()
    return True


def ring(world: MachineWorld, which: float, due_only: bool = False) -> bool:
    """The next timer of all is due, and time with it; or all that are due are rung."""
    rung = False
    while True:
        at, name, owner = inf, "", None
        if world.finished is None:
            for timer, moment in world.timers.items():
                if moment < at:
                    at, name, owner = moment, timer, None
        for process in world.processes:
            if process.alive and not process.frozen:
                for timer, moment in process.timers.items():
                    if moment < at:
                        at, name, owner = moment, timer, process
        if at == inf or (due_only and at > world.now):
            return rung
        late_s = max(0.0, world.now - at)
        world.now = max(world.now, at)
        event = ev.TimerFired(name=name, late_s=late_s)
        if owner is None:
            del world.timers[name]
            world.take(event)
        else:
            del owner.timers[name]
            world.feed(owner, event)
        if not due_only:
            return True
        rung = True
