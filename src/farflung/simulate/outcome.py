"""What a simulation says: means over seeds, each with a 95 % confidence half-width."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds. `half_width` is that of its 95 % confidence interval (Student); inf for one seed.

    >>> Estimate.of([1.0, 2.0, 3.0]).mean
    2.0
    >>> round(Estimate.of([1.0, 2.0, 3.0]).half_width, 2)  # t = 4.30 at 2 degrees of freedom
    2.48
    """

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        num = len(values)
        if num < 2:
            return cls(float(values[0]), math.inf)
        deviation = float(np.std(values, ddof=1))
        return cls(float(np.mean(values)), student(num - 1) * deviation / math.sqrt(num))

    @property
    def interval(self) -> list[float]:
        """[low, high]."""
        return [self.mean - self.half_width, self.mean + self.half_width]


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # two-sided 95 %, 1..9 freedoms


def student(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t.

    >>> student(2), round(student(30), 3)
    (4.303, 2.042)
    """
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z, f = 1.959964, freedom
    return z + (z**3 + z) / (4 * f) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f**2)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one scenario.

    Attributes:
        goodput: time in steps / (learners x time), weighted with the share of an island's chips that took part.
        uptime: share of the time in which at least K islands ran.
        merge_breadth: contributions of a merge; gossip: learners mixed in a round, oneself included.
        merged_share: merged tokens / trained tokens.
        tokens_trained_per_s, tokens_merged_per_s: of all learners together.
        lost: share of the learners' time, by cause. With goodput they add up to 1.
        bytes_up_per_s, bytes_down_per_s: of one learner, bodies of data.
        missed_share: invitations that lapsed, or gossip partners that did not come, of those asked.
        seeds: simulated.
    """

    goodput: Estimate
    uptime: Estimate
    merge_breadth: Estimate
    merged_share: Estimate
    tokens_trained_per_s: float
    tokens_merged_per_s: float
    lost: dict[str, float]
    bytes_up_per_s: float
    bytes_down_per_s: float
    missed_share: float
    seeds: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON: estimates as mean, and their interval beside it."""
        found = asdict(self)
        for name in ("goodput", "uptime", "merge_breadth", "merged_share"):
            estimate: Estimate = getattr(self, name)
            found[name], found[f"{name}_ci"] = estimate.mean, finite(estimate.interval)
        return found


def finite(interval: list[float]) -> list[float] | None:
    """An interval that JSON can hold."""
    return interval if all(math.isfinite(x) for x in interval) else None
