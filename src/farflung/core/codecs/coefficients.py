"""Sparse coefficients of a vector, and their sums over payloads in a given order."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Coefficients(NamedTuple):
    """Some coefficients of a vector. Chunks follow one another, so that every coefficient has a place."""

    place_V: Tensor  # int64, increasing
    value_V: Tensor  # fp32


def weighted_sum(parts: Sequence[Coefficients], weights: Sequence[float]) -> Coefficients:
    """``sum_m w_m c_m`` over all places that any part holds, in the order given, with fp32 accumulators.

    A place that a part does not hold counts as zero: with weights ``1 / W`` this is ``sum / W``.

    Raises:
        ValueError: not as many weights as parts, or none.

    >>> a = Coefficients(torch.tensor([1, 4]), torch.tensor([2.0, 8.0]))
    >>> b = Coefficients(torch.tensor([4, 7]), torch.tensor([6.0, 2.0]))
    >>> weighted_sum([a, b], [0.5, 0.5])
    Coefficients(place_V=tensor([1, 4, 7]), value_V=tensor([1., 7., 1.]))
    """
    place, total, _ = _summed(parts, weights)
    return Coefficients(place, total)


def contributor_mean(parts: Sequence[Coefficients], weights: Sequence[float]) -> Coefficients:
    """``sum_m w_m c_m / sum_m w_m``, both sums over the parts that hold the place.

    What arXiv 2510.03371's code does. A place that few send grows up to W times against `weighted_sum`, which
    is the default for that reason.

    Raises:
        ValueError: as `weighted_sum`, or a weight is not positive.

    >>> a = Coefficients(torch.tensor([1, 4]), torch.tensor([2.0, 8.0]))
    >>> b = Coefficients(torch.tensor([4, 7]), torch.tensor([6.0, 2.0]))
    >>> contributor_mean([a, b], [0.5, 0.5]).value_V
    tensor([2., 7., 2.])
    """
    if not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"weights {list(weights)} must be positive")
    place, total, share = _summed(parts, weights)
    return Coefficients(place, total / share)


def _summed(parts: Sequence[Coefficients], weights: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """All places, the weighted sum at each, and the sum of the weights of the parts that hold it."""
    if not parts or len(parts) != len(weights):
        raise ValueError(f"{len(parts)} parts and {len(weights)} weights: need the same number, at least one")
    place_U: Tensor = torch.cat([part.place_V for part in parts]).unique()  # type: ignore[no-untyped-call]
    total_U, share_U = (torch.zeros(2, len(place_U), device=place_U.device)).unbind()
    for part, weight in zip(parts, weights, strict=True):
        at = torch.searchsorted(place_U, part.place_V)
        total_U[at] += weight * part.value_V  # a part holds a place once, so no two additions race
        share_U[at] += weight
    return place_U, total_U, share_U
