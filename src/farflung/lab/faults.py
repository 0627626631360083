"""A fault plan under virtual time: the same entries that `run` carries out on real processes, and more."""

from collections.abc import Callable
from typing import Any

from farflung.chaos.plan import LINK_TIMEOUT_S, SYNCER, Fault
from farflung.lab.island import VirtualIsland
from farflung.lab.virtual_run import VirtualRun
from farflung.protocol import events as ev


class LabFaults:
    """Carries out what is due, and starts dead processes again as the supervisor of `run` does.

    Args:
        run: whom it befalls.
        plan: what.
        restart_s: from a process's death to its start.
        record: told of each fault that happened.
        disk: told whose disk is full, and when it is no more.
    """

    def __init__(
        self,
        run: VirtualRun,
        plan: list[Fault],
        restart_s: float,
        record: Callable[..., None] = lambda **details: None,
        disk: Callable[[str, bool], None] = lambda node, full: None,
    ) -> None:
        self._run, self._record, self._disk = run, record, disk
        self._waiting = list(plan)
        self._restart_s = restart_s
        self._first_step_s: float | None = None
        self._full: dict[str, float] = {}  # node: until when its disk is full
        run.exited = self._exited

    def review(self, progress: float) -> None:
        """Begin the faults whose time has come; one whose target is down waits until it is up."""
        if not self._waiting:
            return
        if self._first_step_s is None and progress > 0:
            self._first_step_s = self._run.now
        if self._first_step_s is None or self._run.syncer.phase != "training":
            return
        since_s = self._run.now - self._first_step_s
        for fault in [f for f in self._waiting if f.due(progress, since_s)]:
            if self._is_up(fault.target):
                self._waiting.remove(fault)
                self._record(**fault.details())
                self._act(fault)

    def _is_up(self, target: str) -> bool:
        return self._run.syncer_up if target == SYNCER else self._run.island(target).alive

    def _act(self, fault: Fault) -> None:
        if fault.kind == "disk_full":
            self._fill_disk(fault.target, fault.for_s or 0.0)
        elif fault.kind == "syncer_loss":
            self._run.lose_syncer()
            self._after(fault.for_s, self._run.restart_syncer)
        elif fault.target == SYNCER:
            self._run.jump(fault.jump_s or 0.0)
        else:
            self._act_on(fault, self._run.island(fault.target))

    def _act_on(self, fault: Fault, island: VirtualIsland) -> None:
        run, trouble, until_s = self._run, island.trouble, self._run.now + (fault.for_s or 0.0)
        match fault.kind:
            case "kill":
                island.kill()
                self._after(self._restart_s, lambda: self._restart(island))
            case "freeze":
                island.freeze(fault.for_s or 0.0)
            case "slow":
                island.slowdown = fault.factor
                self._after(fault.for_s, lambda: setattr(island, "slowdown", 1.0))
            case "disconnect":
                island.cut()
            case "partition":
                trouble.block(fault.direction, until_s)
                if until_s - run.now > LINK_TIMEOUT_S:
                    connection = island.connection
                    self._after(LINK_TIMEOUT_S, lambda: self._time_out(island, connection))
            case "delay":
                trouble.delay(fault.latency_s or 0.0, until_s)
            case "throttle":
                trouble.throttle(1e6 * (fault.mbps or 0.0), until_s)
            case "duplicate":
                trouble.duplicates += fault.count
            case "corrupt" if fault.part == "chunk":
                trouble.damage(fault.direction, fault.count)
            case "corrupt":
                self._spoil_frame(island, fault.direction)
            case "clock_jump":
                island.jump(fault.jump_s or 0.0)

    def _after(self, for_s: float | None, what: Callable[[], Any]) -> None:
        self._run.time.after(for_s or 0.0, what)

    def _restart(self, island: VirtualIsland) -> None:
        if not island.alive and self._run.finished is None:
            island.start()

    def _exited(self, island: VirtualIsland, ok: bool) -> None:
        """A process ended by itself, and not in order."""
        if not ok:
            self._after(0.0, island.kill)
            self._after(self._restart_s, lambda: self._restart(island))

    @staticmethod
    def _time_out(island: VirtualIsland, connection: int | None) -> None:
        if island.connection == connection:
            island.cut()

    def _spoil_frame(self, island: VirtualIsland, direction: str) -> None:
        """Whoever cannot read a control frame closes the connection."""
        if island.connection is not None and direction != "down":
            self._run.take(ev.Refusal(reason="frame", detail="control frame: damaged"))
        island.cut()

    def _fill_disk(self, node: str, for_s: float) -> None:
        until_s = self._full[node] = max(self._full.get(node, 0.0), self._run.now + for_s)
        self._disk(node, True)

        def empty() -> None:
            if self._full[node] <= until_s:
                self._disk(node, False)

        self._after(for_s, empty)
