"""What fails, how often, and what a failure costs the job that runs on the chips."""

import math
from dataclasses import dataclass, field, replace

from farflung.errors import UserError
from farflung.simulate.returns import Returns

YEAR_S = 365 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class Burst:
    """Chips that fail together inside one island: a host, a rack. Small against an island.

    Args:
        name: of the cause.
        chips: that fail at once.
        mtbi_s: mean time between interruptions of one such group, seconds.
    """

    name: str
    chips: int
    mtbi_s: float

    def __post_init__(self) -> None:
        require(self.chips >= 1, f"burst {self.name!r}: chips", self.chips, "at least 1")
        require(0 < self.mtbi_s < math.inf, f"burst {self.name!r}: mtbi_s", self.mtbi_s, "above 0")


@dataclass(frozen=True, kw_only=True)
class Outage:
    """A part of the whole cluster that goes dark at once: a region, a power feed.

    The chips stand in one row; islands, and the `num_domains` domains, are equal pieces of it in order. So with 8
    islands one of 4 regions holds two of them, and one island that is the whole cluster loses a quarter.

    Args:
        name: of the cause.
        num_domains: equal parts of the cluster, each failing on its own.
        mtbi_s: mean time between outages of one domain, seconds.
        lasts: how long it stays dark.
    """

    name: str
    num_domains: int
    mtbi_s: float
    lasts: Returns

    def __post_init__(self) -> None:
        require(self.num_domains >= 1, f"outage {self.name!r}: num_domains", self.num_domains, "at least 1")
        require(0 < self.mtbi_s < math.inf, f"outage {self.name!r}: mtbi_s", self.mtbi_s, "above 0")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Chips, and how the job on them lives with failures.

    A failure interrupts the job that uses the chip: the clock of failures runs while the job runs, not while it
    stands. A step that is cut goes on afterwards; what it lost is part of `down_s`.

    Args:
        chips: of the whole cluster, in equal islands.
        mtbi_s: mean time between interruptions of one chip, seconds; inf: they never fail.
        returns: how long a failed chip stays away.
        down_s: seconds in which an elastic job stands to go on without failed chips.
        up_s: seconds in which it stands to take returned chips in; a job that is not elastic, to start again.
            Chips that are back before a reconfiguration under way has ended are taken in by it.
        elastic: goes on without failed chips; else it stands until all of them are back.
        speed_spread: standard deviation of chips' speeds, relative: a synchronous job runs at its slowest chip.
        checkpoint_every_s: running seconds between two checkpoints, from which an interrupted job starts again;
            0: nothing is lost (state is kept in memory on other chips).
        checkpoint_cost_s: seconds that the job stands for each checkpoint.
        bursts, outages: failures that are not independent.

    Raises:
        UserError: a value that cannot be.
    """

    chips: int
    mtbi_s: float = YEAR_S
    returns: Returns = field(default_factory=lambda: Returns(scale_s=65.0))
    down_s: float = 15.0
    up_s: float = 15.0
    elastic: bool = True
    speed_spread: float = 0.0
    checkpoint_every_s: float = 0.0
    checkpoint_cost_s: float = 0.0
    bursts: tuple[Burst, ...] = ()
    outages: tuple[Outage, ...] = ()

    def __post_init__(self) -> None:
        require(self.chips >= 1, "chips", self.chips, "at least 1")
        require(self.mtbi_s > 0, "mtbi_s", self.mtbi_s, "above 0")
        for name in ("down_s", "up_s", "speed_spread", "checkpoint_every_s", "checkpoint_cost_s"):
            require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "at least 0")
        if self.checkpoint_cost_s and not self.checkpoint_every_s:
            raise UserError("checkpoint_cost_s has no effect without checkpoint_every_s")

    def island(self, num_islands: int) -> "Cluster":
        """One of `num_islands` equal parts, without what befalls several of them at once.

        >>> Cluster(chips=100).island(8).chips
        12
        """
        require(1 <= num_islands <= self.chips, "learners", num_islands, f"in 1..{self.chips} (chips)")
        return replace(self, chips=self.chips // num_islands, outages=())

    def failures_per_s(self, chips: float) -> float:
        """Interruptions per running second of a job on so many chips."""
        return chips / self.mtbi_s + sum(chips / burst.chips / burst.mtbi_s for burst in self.bursts)


def require(ok: bool, name: str, value: object, wanted: str) -> None:
    """Raise a UserError that names the field, its value and what it must be."""
    if not ok:
        raise UserError(f"{name} = {value}: must be {wanted}")
