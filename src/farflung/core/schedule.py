"""When fragments are due, and the learning-rate schedule. Torch-free.

H: steps between two rounds of the same fragment. P: fragments. tau: overlap in steps.
"""

import math


def check(H: int, P: int, tau: int) -> None:
    """Refuse schedules in which two rounds of one fragment would overlap or two fragments share a step.

    Raises:
        ValueError: unless ``1 <= P <= H`` and ``0 <= tau < H``.

    >>> check(24, 24, 2)
    """
    for name, key, value, least in (
        ("H", "sync_every_steps", H, 1), ("P", "num_fragments", P, 1), ("tau", "overlap_steps", tau, 0),
    ):  # fmt: skip
        if value < least:
            raise ValueError(f"{name} = {value}: must be at least {least} ({name}: {key})")
    if P > H:
        raise ValueError(
            f"P = {P}: must be at most H = {H}, else fragments share a step "
            "(P: num_fragments, H: sync_every_steps)"
        )
    if tau >= H:
        raise ValueError(
            f"tau = {tau}: must be less than H = {H}, else two rounds of one fragment overlap "
            "(tau: overlap_steps, H: sync_every_steps)"
        )


def offsets(H: int, P: int) -> list[int]:
    """Return ``t_p = floor(p H / P)`` for each fragment p: distinct, evenly spread over [0, H).

    >>> offsets(10, 4)
    [0, 2, 5, 7]
    """
    check(H, P, 0)
    return [p * H // P for p in range(P)]


def due_fragment(step: int, H: int, P: int) -> list[int]:
    """Return the fragments due at a step: those with ``step mod H == t_p``, so none or one.

    >>> [due_fragment(step, H=4, P=2) for step in range(4)]
    [[0], [], [1], []]
    """
    if step < 0:
        raise ValueError(f"step = {step}: must not be negative")
    return [p for p, offset in enumerate(offsets(H, P)) if offset == step % H]


def max_in_flight(H: int, P: int, tau: int) -> int:
    """Return how many rounds can be open at once: ``max(1, ceil(tau P / H))``.

    >>> max_in_flight(24, 24, 2)
    2
    """
    check(H, P, tau)
    return max(1, -(-tau * P // H))


def round_interval_s(H: int, P: int, xi_step_s: float) -> float:
    """Return the least time between the openings of two rounds, the throttle: ``H xi_step / P`` seconds.

    Args:
        H: steps between two rounds of the same fragment.
        P: number of fragments.
        xi_step_s: time of an inner step, seconds (median over progressing learners).

    >>> round_interval_s(48, 24, 0.5)
    1.0
    """
    check(H, P, 0)
    if not (math.isfinite(xi_step_s) and xi_step_s >= 0):
        raise ValueError(f"xi_step_s = {xi_step_s}: must be finite and not negative")
    return H * xi_step_s / P


def warmup_cosine(own_steps: int, progress: float, warmup_steps: int = 60, floor: float = 0.1) -> float:
    """Return the learning-rate multiplier: linear warm-up on own steps, times a cosine on the run's progress.

    ``min(1, (own_steps + 1) / warmup_steps) * (floor + (1 - floor) (1 + cos(pi progress)) / 2)``. The papers
    do not define the schedule under asynchronous adoption; this one neither restarts nor jumps when a learner
    skips or rejoins, as long as both inputs persist.

    Args:
        own_steps: inner steps this learner finished before the present one.
        progress: tokens of the whole run / budget; beyond 1 counts as 1.
        warmup_steps: length of the warm-up; 0 for none.
        floor: multiplier at the end, in [0, 1].

    Raises:
        ValueError: an argument outside its range.

    >>> warmup_cosine(0, 0.0, warmup_steps=4), warmup_cosine(100, 1.0)
    (0.25, 0.1)
    """
    for name, value in (("own_steps", own_steps), ("progress", progress), ("warmup_steps", warmup_steps)):
        if not value >= 0:
            raise ValueError(f"{name} = {value}: must be at least 0")
    if not 0 <= floor <= 1:
        raise ValueError(f"floor = {floor}: must be in [0, 1]")
    warmup = min(1.0, (own_steps + 1) / warmup_steps) if warmup_steps else 1.0
    cosine = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    return warmup * (floor + (1 - floor) * cosine)
