"""Who lives, as a tape tells it, and whether merges come while enough learners do."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any

PATIENCE = 3  # times the longest lease, cycle and transfer together: so long may a merge be away


def lease_s(policy: dict[str, Any]) -> float:
    return float(policy.get("lease_s", 10.0))


@dataclass
class Member:
    """What the tape says of one learner."""

    incarnation: int = 0
    training: bool = False
    counted: int = 0  # newest boundary report that was counted
    heard_s: float = -inf
    credit_s: float = 0.0  # the syncer's own lateness since then
    held: dict[int, int] = field(default_factory=dict)
    merged: bool = False  # work of this incarnation
    unmixed: int = 0  # gossip: tokens since its last round ended

    def live(self, now: float, policy: dict[str, Any]) -> bool:
        return self.training and now <= self.heard_s + lease_s(policy) + self.credit_s


@dataclass
class Progress:
    """A merge is due while K learners live that no planned fault holds up.

    Attributes:
        excuses: see `excuses_of`.
        bound_s: longest time without one; None derives it.
        since_s: since when one is expected.
        longest_s: step and transfer so far.
    """

    excuses: list[tuple[str, float, float]]
    bound_s: float | None
    since_s: float = inf
    longest_s: float = 0.0

    def saw(self, took_s: float) -> None:
        """A step or a transfer took so long."""
        self.longest_s = max(self.longest_s, took_s)

    def overdue(self, now: float, live: list[str], policy: dict[str, Any]) -> str:
        """One line if a merge should have come by now; said once."""
        slack_s = lease_s(policy)
        held_up = {name for name, start, stop in self.excuses if start <= now <= stop + slack_s}
        quorum = policy.get("quorum", 1)
        able = [name for name in live if name not in held_up]
        enough = len(able) == len(live) > 0 if quorum == "all" else len(able) >= quorum
        waited_s = now - self.since_s
        if enough and waited_s <= self._bound_s(policy):
            return ""
        self.since_s = now
        return f"no merge for {waited_s:.1f} s with {len(able)} learners there" if enough else ""

    def _bound_s(self, policy: dict[str, Any]) -> float:
        if self.bound_s is not None:
            return self.bound_s
        steps = policy.get("sync_every_steps", 24) / policy.get("num_fragments", 1) + 1
        return float(PATIENCE * (lease_s(policy) + steps * self.longest_s))


def excuses_of(metrics: Iterable[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(learner, from, until) of planned faults that last; in lockstep missed steps are made up for after it."""
    faults = [m for m in metrics if m.get("kind") == "fault" and m.get("for_s")]
    return [(str(m["target"]), float(m["t"]), float(m["t"]) + 2 * float(m["for_s"])) for m in faults]
