"""What may befall a world of machines: ``fault(world, which, how, late)``.

`which` and `how` in [0, 1) choose; `late` is the share of the walk so far.
"""

from collections.abc import Callable

import msgspec

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol.exchange import Exchange
from farflung.testing.machine_process import Process
from farflung.testing.machine_world import MachineWorld

STOP_FROM = 0.6  # share of the walk after which it may be asked to stop


def _some(world: MachineWorld, which: float) -> Process:
    return world.processes[int(which * len(world.processes))]


def _keep(length: int, how: float) -> int:
    return int(how * (length + 1))


def kill(world: MachineWorld, which: float, how: float, late: float) -> None:
    """The process is gone; its last words may have left."""
    process = _some(world, which)
    if process.alive:
        process.stop(keep_up=_keep(len(process.link.up) if process.link else 0, how))
        process.ended = None
    else:
        process.start()


def restart(world: MachineWorld, which: float, how: float, late: float) -> None:
    """A new process in place of a dead one."""
    dead = [p for p in world.processes if not p.alive]
    if dead:
        dead[int(which * len(dead))].start()


def replace(world: MachineWorld, which: float, how: float, late: float) -> None:
    """A new process takes the name before the syncer knows that the old one is gone."""
    process = _some(world, which)
    if process.alive:
        process.stop()
    process.start()


def trainer_gone(world: MachineWorld, which: float, how: float, late: float) -> None:
    """Training crashed; the sidecar says so and ends."""
    process = _some(world, which)
    if process.alive and not process.frozen:
        world.feed(process, ev.TrainerGone(reason="crashed"))


def cut(world: MachineWorld, which: float, how: float, late: float) -> None:
    """The control link breaks: an unknown tail is lost on both ways."""
    link = _some(world, which).link
    if link is not None:
        link.close(_keep(len(link.up), how), _keep(len(link.down), 1 - how if how else 0.5))


def freeze(world: MachineWorld, which: float, how: float, late: float) -> None:
    """Trainer and sidecar stand still, or go on."""
    process = _some(world, which)
    process.frozen = not process.frozen and process.alive


def pass_time(world: MachineWorld, which: float, how: float, late: float) -> None:
    """Nothing arrives for a while."""
    world.now += how * world.policy.lease_s


def repeat(world: MachineWorld, which: float, how: float, late: float) -> None:
    """A retry on a link that lives: the last contribution is sent again, bytes and message.

    Not of one that may be refused and then tried again under the same id: its second fate would be taken for
    that of the second attempt. A real learner repeats only after a reattachment, where the hub answers once.
    """
    process = _some(world, which)
    message, link = process.last_contribute, process.link
    if message is None or link is None or not link.open_up or not process.machine.attached:
        return
    exchange = process.machine.exchange
    assert isinstance(exchange, Exchange)
    out = exchange.lines[message.fragment].outgoing
    payload = process.trainer.uplink[message.fragment]
    if out is None or out.message is not message or payload is None or not payload.finite:
        return
    if world.policy.pace == "free":
        link.up.append(message)
        world.objects[out.object] = payload


def wrong_base(world: MachineWorld, which: float, how: float, late: float) -> None:
    """A contribution on its way names a base that cannot be."""
    link, process = _some(world, which).link, _some(world, which)
    sent = process.last_contribute
    if link is None or sent is None or sum(message is sent for message in link.up) != 1:
        return
    base = sent.base_version + (1 if how < 0.3 else -1 if how < 0.6 else -3)
    at = next(i for i, message in enumerate(link.up) if message is sent)
    link.up[at] = msgspec.structs.replace(sent, base_version=base)
    process.last_contribute = None


def poison(world: MachineWorld, which: float, how: float, late: float) -> None:
    """The next contribution of a learner is not finite."""
    _some(world, which).trainer.poisoned = True


def spoil_merge(world: MachineWorld, which: float, how: float, late: float) -> None:
    """The next merge is not finite."""
    world.spoil_merge = True


def break_transfer(world: MachineWorld, which: float, how: float, late: float) -> None:
    """An upload, a fetch or a donor's state breaks off."""
    found = [
        (p, i)
        for p in world.processes
        if p.alive and not p.frozen
        for i, job in enumerate(p.jobs)
        if not isinstance(job, act.Connect)
    ]
    if found:
        process, index = found[int(which * len(found))]
        world.work(process, index, broken=True)


def stall(world: MachineWorld, which: float, how: float, late: float) -> None:
    """A merge hangs, or every transfer of a learner; or what hung goes on."""
    process = _some(world, which)
    if world.stalled or process.stalled:
        world.go_on()
    elif world.merges and how < 0.5:
        world.stalled.append(world.merges.pop(0))
    else:
        process.stalled = [job for job in process.jobs if not isinstance(job, act.Connect)]
        process.jobs = [job for job in process.jobs if isinstance(job, act.Connect)]


def stop(world: MachineWorld, which: float, how: float, late: float) -> None:
    """The run is asked to stop, late in the walk."""
    if late >= STOP_FROM:
        world.take(ev.StopRequested(mode="finish" if how < 0.4 else "suspend"))


FAULTS: list[Callable[[MachineWorld, float, float, float], None]] = [
    kill, restart, restart, replace, trainer_gone, cut, cut, freeze, freeze, pass_time, repeat, repeat,
    wrong_base, poison, spoil_merge, break_transfer, break_transfer, stall, stall, stop,
]  # fmt: skip
