"""Cutting contributions down before a merge, so that no learner's size decides it."""

from collections.abc import Sequence
from statistics import median


def to_median(norms: Sequence[float]) -> list[float]:
    """Factors that cut each contribution to the median norm of its merge: ``min(1, median / norm)``.

    One learner alone, or two of equal norm, are left as they are; of two the larger is cut to their mean.

    Source: Covenant-72B's rule for SparseLoCo (arXiv 2508.15706): each peer is clipped to the median norm.

    Args:
        norms: M Euclidean norms, finite, >= 0.

    Returns:
        M factors in (0, 1]; all 1 where the median is zero.

    >>> to_median([1.0, 2.0, 8.0]), to_median([3.0, 1.0]), to_median([5.0]), to_median([])
    ([1.0, 1.0, 0.25], [0.6666666666666666, 1.0], [1.0], [])
    """
    middle = median(norms) if norms else 0.0
    return [middle / norm if norm > middle > 0 else 1.0 for norm in norms]
