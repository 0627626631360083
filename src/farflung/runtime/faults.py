"""Faults of a plan on real processes: acts of the operating system, and orders to the sidecars' transport."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from farflung.chaos.plan import LINK, Fault
from farflung.runtime.processes import Child, descendants

SLOW_PERIOD_S = 0.2  # a slow island runs one part in `factor` of each period


class Faults:
    """Carries out what is due.

    Args:
        plan: the faults of a recipe.
        child_of: the process of a learner, or None while it has none.
        record: told of each fault that happened.
        order: tells a learner's sidecar what to do to its link.
    """

    def __init__(
        self,
        plan: list[Fault],
        child_of: Callable[[str], Child | None],
        record: Callable[..., None],
        order: Callable[[Fault], None],
    ) -> None:
        self._waiting, self._child_of, self._record, self._order = list(plan), child_of, record, order
        self._acting: set[asyncio.Task[None]] = set()

    def review(self, progress: float, since_first_step_s: float) -> None:
        """Begin the faults whose time has come; one whose target is down waits until it is up."""
        for fault in [f for f in self._waiting if f.due(progress, since_first_step_s)]:
            child = self._child_of(fault.target)
            if child is not None and child.running:
                self._waiting.remove(fault)
                self._act(fault, child)

    def _act(self, fault: Fault, child: Child) -> None:
        self._record("fault", **fault.details())
        if fault.kind in LINK:
            self._order(fault)
            return
        if fault.kind == "kill":
            _signal(fault, child, signal.SIGKILL)
            return
        work = self._freeze(fault, child) if fault.kind == "freeze" else self._slow(fault, child)
        task = asyncio.create_task(work)
        self._acting.add(task)
        task.add_done_callback(self._acting.discard)

    async def _freeze(self, fault: Fault, child: Child) -> None:
        _signal(fault, child, signal.SIGSTOP)
        await asyncio.sleep(fault.for_s or 0.0)
        _signal(fault, child, signal.SIGCONT)

    async def _slow(self, fault: Fault, child: Child) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + (fault.for_s or 0.0)
        while loop.time() < until_s and child.running:
            _signal(fault, child, signal.SIGSTOP)
            await asyncio.sleep(SLOW_PERIOD_S * (1 - 1 / fault.factor))
            _signal(fault, child, signal.SIGCONT)
            await asyncio.sleep(SLOW_PERIOD_S / fault.factor)


def _signal(fault: Fault, child: Child, number: int) -> None:
    if fault.part == "island":
        child.signal(number)
        return
    pids = [child.pid] if fault.part == "trainer" else descendants(child.pid)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
