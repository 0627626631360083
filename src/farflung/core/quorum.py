"""When a round closes: quorum K, then an adaptive grace window (Decoupled DiLoCo, Eq. 3). Torch-free."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from farflung.errors import did_you_mean

# The paper publishes neither gamma (< 1) nor the EMA constant; these are those of a public re-implementation.
DEFAULT_GAMMA = 0.8
DEFAULT_EMA_CONSTANT = 0.5


@dataclass(frozen=True, kw_only=True)
class Ema:
    """Exponential moving average ``value <- value + constant (x - value)``; the first x is taken as it is.

    Args:
        value: the average so far, None before the first x.
        constant: share of the newest x, in (0, 1].

    >>> Ema().update(4.0).update(2.0).value
    3.0
    """

    value: float | None = None
    constant: float = DEFAULT_EMA_CONSTANT

    def __post_init__(self) -> None:
        if not 0 < self.constant <= 1:
            raise ValueError(f"constant = {self.constant}: must be in (0, 1]")

    def update(self, x: float) -> "Ema":
        """Return the average after one more finite x."""
        if not math.isfinite(x):
            raise ValueError(f"x = {x}: must be finite")
        return replace(self, value=x if self.value is None else self.value + self.constant * (x - self.value))


def grace_s(
    *,
    tau: int,
    xi_step_s: float,
    xi_quorum_s: float,
    xi_sync_s: float,
    gamma: float = DEFAULT_GAMMA,
    max_steps: float = 1.0,
) -> float:
    """Return how long to wait for more contributions once the quorum is there (Decoupled DiLoCo, Eq. 3).

    ``xi_slack = tau xi_step - (xi_quorum + xi_sync)``; ``xi_grace = gamma xi_slack``, 0 without slack, and at
    most ``max_steps xi_step`` (about one step in the paper's main runs). We read its "<=" as "=".

    Args:
        tau: overlap, steps allowed for quorum, merge and transfers.
        xi_step_s: time of an inner step, seconds, as are the next two.
        xi_quorum_s: time until K contributions arrived.
        xi_sync_s: time of merge, outer step and transfers.
        gamma: share of the slack that is used, in [0, 1).
        max_steps: upper bound in inner steps.

    Raises:
        ValueError: a negative or non-finite argument, or gamma outside [0, 1).

    >>> grace_s(tau=2, xi_step_s=1.0, xi_quorum_s=0.5, xi_sync_s=0.5, gamma=0.5)
    0.5
    """
    times = {"xi_step_s": xi_step_s, "xi_quorum_s": xi_quorum_s, "xi_sync_s": xi_sync_s}
    for name, value in {"tau": tau, **times, "max_steps": max_steps}.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} = {value}: must be finite and not negative")
    if not 0 <= gamma < 1:
        raise ValueError(f"gamma = {gamma}: must be in [0, 1)")
    slack_s = tau * xi_step_s - (xi_quorum_s + xi_sync_s)
    return min(gamma * slack_s, max_steps * xi_step_s) if slack_s > 0 else 0.0


def required(quorum: int | Literal["all"], members_at_open: Collection[str], lapsed: Collection[str]) -> int:
    """Return K, the contributions a round needs.

    Args:
        quorum: an integer of at least 1, which no lapsed lease lowers, or ``"all"``: the members with a live
            lease when the round opened, less those whose lease has lapsed since, at least 1.
        members_at_open: names of those members.
        lapsed: names of members whose lease has lapsed; others than those at open do not matter.

    Raises:
        ValueError: quorum is neither.

    >>> required("all", {"a", "b", "c"}, {"b"}), required(3, {"a", "b", "c"}, {"b"})
    (2, 3)
    """
    if isinstance(quorum, str):
        if quorum != "all":
            hint = did_you_mean(quorum, ["all"])
            raise ValueError(f"quorum = {quorum!r}: must be a whole number or 'all'{hint}")
        return max(1, len(set(members_at_open) - set(lapsed)))
    if isinstance(quorum, bool) or not isinstance(quorum, int) or quorum < 1:
        raise ValueError(f"quorum = {quorum!r}: must be a whole number of at least 1, or 'all'")
    return quorum


@dataclass(frozen=True)
class Decision:
    """Close the round now, or wait and why.

    `wait_until_s` is the moment to ask again; None while only an event (arrival, lapse) changes the answer.
    """

    close: bool
    wait_until_s: float | None
    reason: str


def decide(
    *,
    now_s: float,
    arrived: int,
    invited_open: int,
    required: int,
    quorum_reached_s: float | None,
    grace_s: float,
) -> Decision:
    """Decide whether a round closes: at K contributions, then after the grace window or the last invitee.

    Args:
        now_s: the time, in seconds.
        arrived: contributions fully received and checked.
        invited_open: invited learners that may still contribute (not arrived, not past their deadline).
        required: K, from `required`.
        quorum_reached_s: when `arrived` reached `required`; None: it is noticed now.
        grace_s: length of the grace window, seconds.

    >>> decide(now_s=5.0, arrived=2, invited_open=1, required=2, quorum_reached_s=4.0, grace_s=1.5)
    Decision(close=False, wait_until_s=5.5, reason='quorum K=2 reached, in grace for 1 more')
    """
    if arrived < required:
        return Decision(False, None, f"waiting for K={required} contributions, have {arrived}")
    if invited_open == 0:
        return Decision(True, None, f"quorum K={required} reached, nobody else can come")
    until_s = (now_s if quorum_reached_s is None else quorum_reached_s) + grace_s
    if now_s >= until_s:
        return Decision(True, None, f"quorum K={required} reached, grace over")
    return Decision(False, until_s, f"quorum K={required} reached, in grace for {invited_open} more")
