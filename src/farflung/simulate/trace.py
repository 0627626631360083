"""Failures as a fault plan: the TOML that `lab` and `run` execute, so that many chips' failures drive a training.

Three readings. "islands": what an elastic island makes of its chips' failures; it stands still (freeze) for as
long as it reconfigures: for methods whose learners are islands. "job": all chips are one job, and every failure
stops it: for the lab's data_parallel without `elastic`, which stands while any learner does. "chips": each failure
keeps a learner away for as long as the chip is away: for data_parallel that is `elastic`, and can only go on
without a whole learner.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from farflung.chaos.plan import Fault
from farflung.errors import UserError
from farflung.simulate.cluster import Cluster, require
from farflung.simulate.life import Life, live
from farflung.simulate.outages import strikes

Reading = Literal["islands", "job", "chips"]
READINGS: tuple[Reading, ...] = ("islands", "job", "chips")


def lives(cluster: Cluster, num_islands: int, horizon_s: float, seed: int) -> list[Life]:
    """One life an island, outages included."""
    rng = np.random.default_rng(seed)
    befalls = strikes(cluster, num_islands, horizon_s, rng)
    return [live(cluster.island(num_islands), horizon_s, rng, own) for own in befalls]


def faults_of(
    cluster: Cluster, num_learners: int, horizon_s: float, seed: int, reading: Reading = "islands",
    time_scale: float = 1.0,
) -> tuple[list[Life], list[Fault]]:  # fmt: skip
    """Lives of a cluster, one for each learner or one of the whole job, and their plan.

    Args:
        cluster: all chips.
        num_learners: of the run that takes the plan.
        horizon_s: of the lives.
        seed: of their chance.
        reading, time_scale: as of `plan`.

    Raises:
        UserError: a value that cannot be.
    """
    found = lives(cluster, 1 if reading == "job" else num_learners, horizon_s, seed)
    return found, plan(found, reading, time_scale, num_learners)


def plan(
    lives: Sequence[Life], reading: Reading = "islands", time_scale: float = 1.0, num_learners: int = 1
) -> list[Fault]:
    """Freezes of learners, by time.

    Args:
        lives: one a learner; "job": one in all.
        reading: see above.
        time_scale: seconds of the plan for each second of a life: that of the run's step / the islands' step.
        num_learners: "job": who stands in its place, one after the other, since one that stands stops all.

    Raises:
        UserError: an unknown reading, or a time scale that cannot be.

    >>> [fault] = plan([Life(10.0, [0.0, 6.0], [4.0, 10.0], [1.0, 1.0])], time_scale=0.5)
    >>> fault.target, fault.at_s, fault.for_s
    ('learner-0', 2.0, 1.0)
    """
    require(0 < time_scale < float("inf"), "time_scale", time_scale, "above 0")
    if reading not in READINGS:
        raise UserError(f"reading = {reading!r}: must be one of {', '.join(READINGS)}")
    found = []
    for index, life in enumerate(lives):
        away = _joined(life.failures) if reading == "chips" else life.downs()
        for number, (start_s, end_s) in enumerate(away):
            whom = number % num_learners if reading == "job" else index
            found.append(
                Fault(
                    kind="freeze", target=f"learner-{whom}", at_s=round(start_s * time_scale, 6),
                    for_s=max(1e-6, round((end_s - start_s) * time_scale, 6)),
                )
            )  # fmt: skip
    return sorted(found, key=lambda fault: (fault.at_s or 0.0, fault.target))


def _joined(failures: Iterable[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """(from, until) of failures (when, how long), those that overlap as one."""
    spans: list[tuple[float, float]] = []
    for at_s, for_s in sorted(failures):
        if spans and at_s <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], at_s + for_s))
        else:
            spans.append((at_s, at_s + for_s))
    return spans


def to_toml(faults: Sequence[Fault], comment: str) -> str:
    """A file for a recipe's ``faults = FILE``.

    >>> print(to_toml([Fault(kind="freeze", target="learner-0", at_s=2.0, for_s=1.0)], "two lines"))
    # two lines
    <BLANKLINE>
    [[faults]]
    kind = "freeze"
    target = "learner-0"
    at_s = 2.0
    for_s = 1.0
    <BLANKLINE>
    """
    blocks = [f"# {comment}\n"] if faults else [f"# {comment}\n", "faults = []\n"]
    for fault in faults:
        blocks.append(
            f'[[faults]]\nkind = "{fault.kind}"\ntarget = "{fault.target}"\n'
            f"at_s = {fault.at_s}\nfor_s = {fault.for_s}\n"
        )
    return "\n".join(blocks)


def write(path: Path, faults: Sequence[Fault], comment: str) -> None:
    """Write the plan.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.write_text(to_toml(faults, comment))
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
