"""Faults of a plan as acts of the operating system on real processes."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

from farflung.chaos.plan import Fault
from farflung.runtime.processes import Child, descendants

SLOW_PERIOD_S = 0.2  # a slow island runs one part in `factor` of each period


class Faults:
    """Carries out what is due.

    Args:
        plan: the faults of a recipe.
        child_of: the process of a learner, or None while it has none.
        record: told of each fault that happened.
    """

    def __init__(
        self, plan: list[Fault], child_of: Callable[[str], Child | None], record: Callable[..., None]
    ) -> None:
        self._waiting, self._child_of, self._record = list(plan), child_of, record
        self._acting: set[asyncio.Task[None]] = set()

    def review(self, progress: float, since_first_step_s: float) -> None:
        """Begin the faults whose time has come; one whose target is down waits until it is up."""
        for fault in list(self._waiting):
            due = (fault.at_progress is not None and progress >= fault.at_progress) or (
                fault.at_s is not None and since_first_step_s >= fault.at_s
            )
            child = self._child_of(fault.target)
            if due and child is not None and child.running:
                self._waiting.remove(fault)
                self._act(fault, child)

    def _act(self, fault: Fault, child: Child) -> None:
        details: dict[str, Any] = {"fault": fault.kind, "target": fault.target, "what": fault.what}
        if fault.for_s is not None:
            details["for_s"] = fault.for_s
        self._record("fault", **details)
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
    if fault.what == "island":
        child.signal(number)
        return
    pids = [child.pid] if fault.what == "trainer" else descendants(child.pid)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
