"""A fault plan under virtual time: the same entries that `run` carries out by acts of the operating system."""

from collections.abc import Callable
from typing import Any

from farflung.chaos.plan import Fault
from farflung.lab.island import VirtualIsland
from farflung.lab.virtual_run import VirtualRun
from farflung.recipe import Recipe


class LabFaults:
    """Carries out what is due.

    Args:
        run: whom it befalls.
        recipe: its plan and the pause before a restart.
        record: told of each fault that happened.
    """

    def __init__(self, run: VirtualRun, recipe: Recipe, record: Callable[..., None]) -> None:
        self._run, self._record = run, record
        self._waiting = list(recipe.faults)
        self._restart_s = recipe.restart_s + recipe.lab.startup_s
        self._first_step_s: float | None = None

    def review(self, progress: float) -> None:
        """Begin the faults whose time has come; one whose target is down waits until it is up."""
        if not self._waiting:
            return
        if self._first_step_s is None and progress > 0:
            self._first_step_s = self._run.now
        if self._first_step_s is None or self._run.syncer.phase != "training":
            return
        since_s = self._run.now - self._first_step_s
        for fault in list(self._waiting):
            due = (fault.at_progress is not None and progress >= fault.at_progress) or (
                fault.at_s is not None and since_s >= fault.at_s
            )
            island = self._run.island(fault.target)
            if due and island.alive:
                self._waiting.remove(fault)
                self._act(fault, island)

    def _act(self, fault: Fault, island: VirtualIsland) -> None:
        details: dict[str, Any] = {"fault": fault.kind, "target": fault.target, "what": fault.what}
        if fault.for_s is not None:
            details |= {"for_s": fault.for_s}
        self._record(**details)
        if fault.kind == "kill":
            island.kill()
            self._run.time.after(self._restart_s, lambda: self._restart(island))
        elif fault.kind == "freeze":
            island.freeze(fault.for_s or 0.0)
        else:
            island.slowdown = fault.factor
            self._run.time.after(fault.for_s or 0.0, lambda: setattr(island, "slowdown", 1.0))

    def _restart(self, island: VirtualIsland) -> None:
        if not island.alive and self._run.finished is None:
            island.start()
