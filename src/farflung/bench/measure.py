"""What a measurement is, and how two speeds are compared on a machine that others use too.

No measurement stands alone: each is the speed of ours divided by the speed of what the machine can do, taken
just before and just after, so that a busy neighbour slows both. No torch here: child processes import this.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from farflung.units import MIB

Speed = Callable[[], float]
"""Does a thing once; returns its speed, > 0."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How large and how often.

    Args:
        vector_bytes: of one contribution, of the codecs' vector, of one transfer and of the copied buffer.
        repetitions: of each memory or transport measurement.
        scale: of the model that is trained.
        num_blocks: blocks of training steps with a learner; one more without surround them.
        block_steps: timed steps of a block.
        lead_steps: steps before them that are not timed: the pipeline fills, or what is under way ends.
        threads: torch threads; one, because that is what a syncer and a learner use.
        machine_steps: steps of each learner in the run whose events the machines are given.
        lab_scale, lab_steps: model and steps of each learner in one repetition of the lab's measurement.
        lab_repetitions: of that.
        lab_crowd, lab_crowd_steps: gossip partners in the lab, and steps of each in one repetition.
        simulate_cells, simulate_half_width: cells of table 1, and how exact each.
        simulate_seeds: of the simulation whose chips are counted.
        simulate_repetitions: of both.
    """

    vector_bytes: int = 64 * MIB
    repetitions: int = 9
    scale: str = "small"
    num_blocks: int = 32
    block_steps: int = 4
    lead_steps: int = 2
    threads: int = 1
    machine_steps: int = 300
    lab_scale: str = "tiny"
    lab_steps: int = 192
    lab_repetitions: int = 5
    lab_crowd: int = 256
    lab_crowd_steps: int = 40
    simulate_cells: int = 30
    simulate_half_width: float = 0.01
    simulate_seeds: int = 8
    simulate_repetitions: int = 3


FULL = Settings()
QUICK = Settings(
    vector_bytes=1 * MIB, repetitions=2, scale="micro", num_blocks=2, block_steps=3, lead_steps=1,
    machine_steps=30, lab_scale="micro", lab_steps=8, lab_repetitions=1,
    lab_crowd=8, lab_crowd_steps=10, simulate_cells=2, simulate_half_width=0.1, simulate_seeds=2,
    simulate_repetitions=1,
)  # fmt: skip
"""A few seconds in all: shows that everything works, and says nothing about speed."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One ratio, ours / reference, 1 = as fast as the reference.

    Attributes:
        ratios: one for each repetition.
        reference: median speed of the reference, in `unit`.
        unit: of speeds.
        what: what the ratio means, one sentence.
        aim: what we want it to be at least; None: no aim is set.
        less_is_better: the ratio is of times; the aim is the most we want.
        note: what else was seen.
    """

    ratios: tuple[float, ...]
    reference: float
    unit: str
    what: str
    aim: float | None = None
    less_is_better: bool = False
    note: str = ""

    @property
    def missed(self) -> bool:
        """The aim was not reached."""
        return self.aim is not None and (
            self.ratio > self.aim if self.less_is_better else self.ratio < self.aim
        )

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def low(self) -> float:
        return min(self.ratios)

    @property
    def high(self) -> float:
        return max(self.ratios)


def interleave(ours: Speed, reference: Speed, repetitions: int) -> tuple[tuple[float, ...], float]:
    """Take turns: reference, ours, reference, ours, ..., reference.

    Returns:
        For each repetition ours / mean of the reference before and after it; and the reference's median.

    >>> interleave(lambda: 3.0, iter([4.0, 8.0, 4.0]).__next__, 2)
    ((0.5, 0.5), 4.0)
    """
    before, references, ratios = reference(), [], []
    references.append(before)
    for _ in range(repetitions):
        speed = ours()
        after = reference()
        ratios.append(2 * speed / (before + after))
        references.append(after)
        before = after
    return tuple(ratios), median(references)


def speed_of(work: Callable[[], object], amount: float) -> Speed:
    """The speed at which `work` does `amount` of something, in amount / s."""

    def measured() -> float:
        began_s = time.perf_counter()
        work()
        return amount / (time.perf_counter() - began_s)

    return measured
