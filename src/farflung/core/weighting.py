"""How much a contribution counts: weight rules and their normalisation. Torch-free."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction


def tokens(c_tokens: int, c_steps: int) -> float:
    """Quantity times quality: ``w = c_tokens * (c_tokens / c_steps)`` (Decoupled DiLoCo, Algorithm 2).

    Args:
        c_tokens: tokens of the learner since it last received the fragment.
        c_steps: its steps in the same window; 0 gives weight 0.

    >>> tokens(2000, 4), tokens(0, 0)
    (1000000.0, 0.0)
    """
    return c_tokens * c_tokens / c_steps if c_steps else 0.0


def quantity(c_tokens: int, c_steps: int) -> float:
    """Weight by tokens alone: ``w = c_tokens``.

    >>> quantity(2000, 4)
    2000.0
    """
    return float(c_tokens)


def equal(c_tokens: int, c_steps: int) -> float:
    """Every contribution counts the same (DiLoCo, arXiv 2311.08105): ``w = 1``.

    >>> equal(2000, 4)
    1.0
    """
    return 1.0


WEIGHTINGS: dict[str, Callable[[int, int], float]] = {"tokens": tokens, "quantity": quantity, "equal": equal}


def normalise(weights: Sequence[float]) -> list[float]:
    """Return ``w_m / sum(w)``: weights that sum to 1 (float64, to rounding).

    Computed exactly and rounded once: the order does not matter, N equal weights give exactly 1/N, and no sum
    overflows.

    Raises:
        ValueError: no weight, one that is negative or not finite, or all of them zero.

    >>> normalise([1.0, 3.0])
    [0.25, 0.75]
    """
    for index, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weights[{index}] = {weight}: must be finite and not negative")
    if not any(weights):
        raise ValueError(f"weights = {list(weights)}: at least one must be positive")
    total = sum(map(Fraction, weights))
    return [float(Fraction(weight) / total) for weight in weights]
