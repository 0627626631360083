"""Fault plans that are drawn: the same data and seed give the same plan.

A generator spreads its faults over a part of the run, given in shares of the token budget or in seconds.
"""

import random
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any, Literal

import msgspec

from farflung.chaos.plan import Direction, Fault, Kind
from farflung.errors import UserError

NUMBERS = {  # of the generators: least and most
    "per_learner": (0, 1e6),
    "times": (0, 1e6),
    "share": (0, 1),
    "one_way": (0, 1),
    "num_learners": (1, 1e6),
}
SPANS = {"for_s": 0, "mbps": 0, "factor": 1}  # what both ends of a span must be above


class Generator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="generator"):
    """What all generators have.

    Args:
        seed: of its own; None takes the plan's.
        progress: the part of the run, in shares of the token budget; or
        seconds: the same in seconds after the first step.
    """

    seed: int | None = None
    progress: tuple[float, float] = (0.05, 0.9)
    seconds: tuple[float, float] | None = None

    def faults(self, learners: Sequence[str], draw: random.Random) -> list[Fault]:
        raise NotImplementedError

    def check(self, where: str) -> None:
        """Raise UserError, naming `where` it stands, for numbers that cannot be."""
        start, stop = self.progress
        if not 0 <= start < stop <= 1:
            raise UserError(f"{where}: progress = {[start, stop]}: must grow, within 0..1")
        if self.seconds is not None and not 0 <= self.seconds[0] < self.seconds[1] < float("inf"):
            raise UserError(f"{where}: seconds = {list(self.seconds)}: must grow, from 0 or later")
        for field, (least, most) in NUMBERS.items():
            value = getattr(self, field, least)
            if not least <= value <= most:
                raise UserError(f"{where}: {field} = {value}: must be in {least}..{most:g}")
        for field, least in SPANS.items():
            low, high = getattr(self, field, (2.0, 2.0))
            if not least < low <= high < float("inf"):
                raise UserError(
                    f"{where}: {field} = {[low, high]}: two numbers above {least} that do not fall"
                )

    def moment(self, share: float) -> dict[str, Any]:
        """A fault's `at_progress` or `at_s`, `share` of the way through the part."""
        start, stop = self.progress if self.seconds is None else self.seconds
        at = start + share * (stop - start)
        return {"at_progress": at} if self.seconds is None else {"at_s": at}


class Poisson(Generator, frozen=True, tag="poisson"):
    """Each learner is hit at random moments, independently of the others.

    Args:
        per_learner: faults of one learner in the whole part, in the mean.
        kinds: one of these each time: kill, freeze, slow, disconnect, partition, duplicate, corrupt.
        for_s: shortest and longest, where a kind lasts.
    """

    per_learner: float = 1.0
    kinds: tuple[
        Literal["kill", "freeze", "slow", "disconnect", "partition", "duplicate", "corrupt"], ...
    ] = ("kill",)
    for_s: tuple[float, float] = (1.0, 5.0)

    def faults(self, learners: Sequence[str], draw: random.Random) -> list[Fault]:
        found = []
        for learner in learners:
            for share in arrivals(self.per_learner, draw):
                kind: Kind = draw.choice(self.kinds)
                for_s = draw.uniform(*self.for_s) if kind in LASTING else None
                found.append(Fault(kind=kind, target=learner, for_s=for_s, **self.moment(share)))
        return found


class RegionLoss(Generator, frozen=True, tag="region_loss"):
    """Several learners are hit at one moment, as by a power cut or a lost uplink.

    Args:
        num_learners: of the region; drawn anew each time.
        times: how often.
        kind: kill, freeze or partition.
        for_s: shortest and longest, where the kind lasts; the same for all of the region.
    """

    num_learners: int = 2
    times: int = 1
    kind: Literal["kill", "freeze", "partition"] = "kill"
    for_s: tuple[float, float] = (5.0, 10.0)

    def faults(self, learners: Sequence[str], draw: random.Random) -> list[Fault]:
        found = []
        for _ in range(self.times):
            region = sorted(draw.sample(list(learners), min(self.num_learners, len(learners))))
            moment, lasts_s = self.moment(draw.random()), draw.uniform(*self.for_s)
            for_s = lasts_s if self.kind in LASTING else None
            found += [Fault(kind=self.kind, target=name, for_s=for_s, **moment) for name in region]
        return found


class Stragglers(Generator, frozen=True, tag="stragglers"):
    """Some learners are slow from the beginning of the part on.

    Args:
        share: of the learners, rounded up.
        factor: least and largest slowness.
        for_s: shortest and longest.
    """

    share: float = 0.25
    factor: tuple[float, float] = (1.5, 3.0)
    for_s: tuple[float, float] = (60.0, 60.0)

    def faults(self, learners: Sequence[str], draw: random.Random) -> list[Fault]:
        return [
            Fault(
                kind="slow", target=name, factor=draw.uniform(*self.factor), for_s=draw.uniform(*self.for_s),
                **self.moment(0.0),
            )
            for name in chosen(learners, self.share, draw)
        ]  # fmt: skip


class Partitions(Generator, frozen=True, tag="partitions"):
    """Links are cut off at random moments, some of them one way only.

    Args:
        per_learner: in the whole part, in the mean.
        one_way: share of them.
        for_s: shortest and longest.
    """

    per_learner: float = 1.0
    one_way: float = 0.5
    for_s: tuple[float, float] = (1.0, 10.0)

    def faults(self, learners: Sequence[str], draw: random.Random) -> list[Fault]:
        found = []
        for name in learners:
            for share in arrivals(self.per_learner, draw):
                ways: list[Direction] = ["up", "down"] if draw.random() < self.one_way else ["both"]
                found.append(
                    Fault(
                        kind="partition", target=name, direction=draw.choice(ways),
                        for_s=draw.uniform(*self.for_s), **self.moment(share),
                    )
                )  # fmt: skip
        return found


class ThrottledLinks(Generator, frozen=True, tag="throttled_links"):
    """Some learners have a thin link from the beginning of the part on.

    Args:
        share: of the learners, rounded up.
        mbps: least and largest that is left.
        for_s: shortest and longest.
    """

    share: float = 0.5
    mbps: tuple[float, float] = (1.0, 20.0)
    for_s: tuple[float, float] = (60.0, 60.0)

    def faults(self, learners: Sequence[str], draw: random.Random) -> list[Fault]:
        return [
            Fault(
                kind="throttle", target=name, mbps=draw.uniform(*self.mbps), for_s=draw.uniform(*self.for_s),
                **self.moment(0.0),
            )
            for name in chosen(learners, self.share, draw)
        ]  # fmt: skip


AnyGenerator = Poisson | RegionLoss | Stragglers | Partitions | ThrottledLinks
GENERATORS: dict[str, type[Generator]] = {
    "poisson": Poisson,
    "region_loss": RegionLoss,
    "stragglers": Stragglers,
    "partitions": Partitions,
    "throttled_links": ThrottledLinks,
}
LASTING = ("freeze", "slow", "partition")


def generate(generators: Iterable[Generator], learners: Sequence[str], seed: int) -> list[Fault]:
    """The faults of all generators, each of them sorted by moment.

    >>> storm = [RegionLoss(num_learners=2, seconds=(0, 60))]
    >>> plan = generate(storm, ["a", "b", "c"], seed=1)
    >>> len(plan), plan[0].at_s == plan[1].at_s, plan == generate(storm, ["a", "b", "c"], seed=1)
    (2, True, True)
    """
    found: list[Fault] = []
    for number, generator in enumerate(generators):
        own = seed if generator.seed is None else generator.seed
        faults = generator.faults(learners, random.Random(f"{own}.{number}"))
        found += sorted(faults, key=_moment)
    return found


def _moment(fault: Fault) -> float:
    return (fault.at_progress if fault.at_s is None else fault.at_s) or 0.0


def arrivals(mean: float, draw: random.Random) -> list[float]:
    """Moments of a Poisson process in [0, 1), `mean` of them in the mean."""
    found: list[float] = []
    at = draw.expovariate(mean) if mean else 1.0
    while at < 1.0:
        found.append(at)
        at += draw.expovariate(mean)
    return found


def chosen(learners: Sequence[str], share: float, draw: random.Random) -> list[str]:
    """A random share of the learners, rounded up, in order."""
    return sorted(draw.sample(list(learners), ceil(share * len(learners))))
