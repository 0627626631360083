"""Fault plans as data: what happens to whom, when, and for how long."""

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, Literal

import msgspec

from farflung.errors import UserError, did_you_mean

Kind = Literal[
    "kill", "freeze", "slow", "disconnect", "partition", "delay", "throttle", "duplicate", "corrupt",
    "clock_jump", "disk_full", "syncer_loss",
]  # fmt: skip
What = Literal["island", "trainer", "sidecar", "chunk", "frame"]
Direction = Literal["both", "up", "down"]

SYNCER = "syncer"  # a target beside the learners

FIELDS: dict[Kind, tuple[str, ...]] = {  # beside kind, target and the moment
    "kill": ("what",),
    "freeze": ("for_s", "what"),
    "slow": ("for_s", "factor", "what"),
    "disconnect": (),
    "partition": ("for_s", "direction"),
    "delay": ("for_s", "latency_s"),
    "throttle": ("for_s", "mbps"),
    "duplicate": ("count",),
    "corrupt": ("count", "direction", "what"),
    "clock_jump": ("jump_s",),
    "disk_full": ("for_s",),
    "syncer_loss": ("for_s",),
}
PROCESS: tuple[Kind, ...] = ("kill", "freeze", "slow")  # acts of the operating system
LINK: tuple[Kind, ...] = ("disconnect", "partition", "delay", "throttle", "duplicate", "corrupt")
LAB_ONLY: tuple[Kind, ...] = ("clock_jump", "disk_full", "syncer_loss")
ON_SYNCER: tuple[Kind, ...] = ("clock_jump", "disk_full", "syncer_loss")

HINTS = {("kill", "for_s"): "; restart_s of the recipe sets the pause"}

LINK_TIMEOUT_S = 45.0  # silence after which both ends close a link: a ping every 30 s, half of it to answer


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of ``[[faults]]``.

    kill: SIGKILL, the supervisor starts it again. freeze: SIGSTOP for `for_s`, then SIGCONT. slow: for `for_s`
    it runs only one part in `factor` of the time. disconnect: the link is lost, with what is on its way; the
    learner dials again. partition: for `for_s` nothing passes in `direction`; the link outlives it unless it
    lasts longer than LINK_TIMEOUT_S. delay: `latency_s` more, one way, for `for_s`. throttle: bulk passes at
    `mbps` each way for `for_s`. duplicate: the next `count` contributions are sent twice, as retries. corrupt:
    the next `count` chunks (or control frames) are damaged on their way. clock_jump: the clock that drives one
    node leaps ahead. disk_full: for `for_s` its tape cannot be written. syncer_loss: the syncer is gone for
    `for_s`, then goes on from its last state; whatever lay in open rounds is lost.

    Args:
        kind: see above.
        target: a learner's name, ``learner-1``; or ``syncer``.
        at_progress: share of the token budget that is spent when it happens, 0..1; or
        at_s: seconds after the run's first step.
        for_s: how long.
        factor: how many times slower (slow).
        direction: up is from the learner to the syncer (partition, corrupt).
        latency_s: more than usual (delay).
        mbps: Mbit/s that are left (throttle).
        count: how many (duplicate, corrupt).
        jump_s: how far ahead (clock_jump); nothing here reads a clock that can go back.
        what: of kill, freeze and slow: the whole island, or only its trainer or sidecar process; of corrupt: a
            bulk chunk, caught by its checksum, or a control frame, which costs the connection.
    """

    kind: Kind
    target: str
    at_progress: float | None = None
    at_s: float | None = None
    for_s: float | None = None
    factor: float = 2.0
    direction: Direction = "both"
    latency_s: float | None = None
    mbps: float | None = None
    count: int = 1
    jump_s: float | None = None
    what: What | None = None

    @property
    def part(self) -> What:
        """`what`, or its default."""
        return self.what or ("chunk" if self.kind == "corrupt" else "island")

    def due(self, progress: float, since_first_step_s: float) -> bool:
        """Whether its moment has come."""
        if self.at_progress is not None:
            return progress >= self.at_progress
        return self.at_s is not None and since_first_step_s >= self.at_s

    def details(self) -> dict[str, Any]:
        """What a log of faults should say of it."""
        named: dict[str, Any] = {
            field: getattr(self, field) for field in FIELDS[self.kind] if field != "what"
        }
        what = {"what": self.part} if "what" in FIELDS[self.kind] else {}
        return {"fault": self.kind, "target": self.target, **what, **named}

    def check(self, where: str, learners: Sequence[str] | None = None) -> None:
        """Raise UserError, naming `where` it stands, for a fault that cannot be."""
        self._check_moment(where)
        self._check_fields(where)
        if learners is not None:
            self._check_target(where, learners)

    def _check_moment(self, where: str) -> None:
        if (self.at_progress is None) == (self.at_s is None):
            raise UserError(f"{where}: give one of at_progress and at_s")
        if self.at_progress is not None and not 0 <= self.at_progress <= 1:
            raise UserError(f"{where}: at_progress = {self.at_progress}: must be in 0..1")
        if self.at_s is not None and not 0 <= self.at_s < inf:
            raise UserError(f"{where}: at_s = {self.at_s}: must not be negative")

    def _check_fields(self, where: str) -> None:
        own = FIELDS[self.kind]
        for field in ("for_s", "latency_s", "mbps", "jump_s"):
            value = getattr(self, field)
            if field in own and not (value is not None and 0 < value < inf):
                given = "" if value is None else f", not {value}"
                raise UserError(f"{where}: {self.kind} needs {field} above 0{given}")
        for field in self.__struct_fields__[4:]:
            if field not in own and getattr(self, field) != _DEFAULTS[field]:
                hint = HINTS.get((self.kind, field), "")
                raise UserError(f"{where}: {field} has no effect on {self.kind}{hint}")
        if not 1 < self.factor < inf:
            raise UserError(f"{where}: factor = {self.factor}: must be above 1")
        if self.count < 1:
            raise UserError(f"{where}: count = {self.count}: must be at least 1")
        wholes = ("chunk", "frame") if self.kind == "corrupt" else ("island", "trainer", "sidecar")
        if "what" in own and self.part not in wholes:
            raise UserError(f"{where}: what = {self.part!r}: {self.kind} knows {', '.join(wholes)}")

    def _check_target(self, where: str, learners: Sequence[str]) -> None:
        if self.kind == "syncer_loss" and self.target != SYNCER:
            raise UserError(f"{where}: target = {self.target!r}: a syncer_loss befalls {SYNCER!r}")
        if self.target == SYNCER and self.kind not in ON_SYNCER:
            raise UserError(f"{where}: target = {SYNCER!r}: {self.kind} befalls a learner")
        if self.target != SYNCER and self.target not in learners:
            known = did_you_mean(self.target, learners)
            raise UserError(f"{where}: target = {self.target!r} is no learner{known}")


_DEFAULTS = dict(zip(Fault.__struct_fields__[2:], Fault.__struct_defaults__, strict=True))


def check_for_run(faults: Iterable[Fault]) -> None:
    """Raise UserError for a fault that real processes cannot be given."""
    for number, fault in enumerate(faults, 1):
        if fault.kind in LAB_ONLY:
            raise UserError(
                f"fault {number}: {fault.kind} cannot be done to a real run; in virtual time it can: farflung lab"
            )
