"""Fault plans as data: what happens to whom, when, and for how long."""

from typing import Literal

import msgspec

from farflung.errors import UserError

Kind = Literal["kill", "freeze", "slow"]
What = Literal["island", "trainer", "sidecar"]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of ``[[faults]]``.

    kill: SIGKILL, the supervisor starts it again. freeze: SIGSTOP for `for_s`, then SIGCONT. slow: for `for_s`
    it runs only one part in `factor` of the time.

    Args:
        kind: kill, freeze or slow.
        target: a learner's name, ``learner-1``.
        at_progress: share of the token budget that is spent when it happens, 0..1; or
        at_s: seconds after the run's first step.
        for_s: how long (freeze, slow).
        factor: how many times slower (slow).
        what: the whole island, or only its trainer or sidecar process.
    """

    kind: Kind
    target: str
    at_progress: float | None = None
    at_s: float | None = None
    for_s: float | None = None
    factor: float = 2.0
    what: What = "island"

    def check(self, where: str) -> None:
        """Raise UserError, naming `where` it stands, for a fault that cannot be."""
        if (self.at_progress is None) == (self.at_s is None):
            raise UserError(f"{where}: give one of at_progress and at_s")
        if self.at_progress is not None and not 0 <= self.at_progress <= 1:
            raise UserError(f"{where}: at_progress = {self.at_progress}: must be in 0..1")
        if self.at_s is not None and self.at_s < 0:
            raise UserError(f"{where}: at_s = {self.at_s}: must not be negative")
        if self.kind != "kill" and not (self.for_s and self.for_s > 0):
            raise UserError(f"{where}: {self.kind} needs for_s above 0")
        if self.kind == "kill" and self.for_s is not None:
            raise UserError(f"{where}: for_s has no effect on kill; restart_s of the recipe sets the pause")
        if self.factor <= 1:
            raise UserError(f"{where}: factor = {self.factor}: must be above 1")
