"""Lockstep pace: which own step of a learner belongs to which round. Round r of a fragment makes version r."""

from collections.abc import Sequence

from farflung.core.schedule import offsets


def snapshot_step(fragment: int, round: int, H: int, P: int) -> int:
    """Own step at which a learner snapshots for a round: the round-th step s > 0 with ``s mod H == t_p``.

    >>> [snapshot_step(0, r, H=8, P=2) for r in (1, 2)], [snapshot_step(1, r, H=8, P=2) for r in (1, 2)]
    ([8, 16], [4, 12])
    """
    return (offsets(H, P)[fragment] or H) + (round - 1) * H


def joiner_step(versions: Sequence[int], H: int, tau: int) -> int:
    """Own step at which a joiner that installs `versions` enters.

    The last step whose adoption is in the versions, but before the first snapshot that is not: a joiner takes
    part in every round that can still wait for it, with as long a window of its own work as that allows.

    >>> joiner_step([3], H=10, tau=0), joiner_step([2, 2], H=8, tau=1)
    (30, 17)
    """
    P = len(versions)
    done = [snapshot_step(p, v, H, P) + tau for p, v in enumerate(versions) if v > 0]
    todo = [snapshot_step(p, v + 1, H, P) - 1 for p, v in enumerate(versions)]
    return min(max(done, default=0), min(todo))
