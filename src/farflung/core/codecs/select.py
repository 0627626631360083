"""Which coefficients of each chunk travel: the largest, or some drawn by a seed that both sides know.

Positions of a chunk are sorted, so a payload has one form. Legend: K chunks of B coefficients, k chosen.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_MAGNITUDE = 0x7FFFFFFF  # all bits of a fp32 number but the sign: as int32 they sort like |x|, NaN on top


def top_k(coef_KB: Tensor, k: int) -> Tensor:
    """Positions of the k largest magnitudes of each chunk, int64 ``[K, k]``; of equal ones the first.

    A NaN is larger than everything. Same result as `top_k_plain`: the k-th magnitude is found without
    sorting, then everything above it is taken, and as many that equal it as there is room for.

    Args:
        coef_KB: contiguous fp32.
        k: 1 to B.

    >>> top_k(torch.tensor([[1.0, -3.0, 2.0, -2.0, 0.0]]), 2)
    tensor([[1, 2]])
    """
    num, size = coef_KB.shape
    magnitude_KB = coef_KB.view(torch.int32) & _MAGNITUDE
    least_K1 = _kth_largest(magnitude_KB, k)
    taken_KB = magnitude_KB >= least_K1
    at = _places(taken_KB)
    if at.numel() > num * k:
        _drop_ties(taken_KB, magnitude_KB, least_K1, k)
        at = _places(taken_KB)
    return at.view(num, k) - size * torch.arange(num, device=at.device)[:, None]


def top_k_plain(coef_KB: Tensor, k: int) -> Tensor:
    """`top_k` by a stable sort of everything: five to ten times slower."""
    magnitude_KB = coef_KB.view(torch.int32) & _MAGNITUDE
    order_KB = magnitude_KB.sort(dim=1, descending=True, stable=True).indices
    return order_KB[:, :k].sort(dim=1).values


def drawn(num: int, k: int, seed: int, counter: int) -> tuple[int, ...]:
    """k of the positions 0 to num - 1, sorted: the ``counter``-th draw of a seed.

    The positions are shuffled and dealt k at a time, so that ``ceil(num / k)`` draws in a row, the first a
    multiple of that, hold every position. Only integer arithmetic: the same on every machine.

    Args:
        num: how many there are.
        k: 1 to num.
        seed, counter: whole numbers, used modulo 2^64.

    >>> [drawn(6, 2, seed=1, counter=i) for i in range(3)]
    [(2, 5), (1, 4), (0, 3)]
    """
    rounds = -(-num // k)
    epoch, turn = divmod(counter % 2**64, rounds)
    order = _shuffled(num, seed, epoch)
    return tuple(sorted(order[(turn * k + i) % num] for i in range(k)))


@lru_cache(maxsize=8)
def _shuffled(num: int, seed: int, epoch: int) -> tuple[int, ...]:
    salt = _mixed(_mixed(seed) ^ epoch)
    return tuple(sorted(range(num), key=lambda i: (_mixed(salt ^ i), i)))


def _mixed(z: int) -> int:
    """One step of splitmix64 (Steele, Lea and Flood, 2014)."""
    z = (z + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def _has_numpy(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _kth_largest(magnitude_KB: Tensor, k: int) -> Tensor:
    """The k-th largest of each row, ``[K, 1]``. On CPUs with numpy: ten times faster than ``torch.topk``."""
    place = magnitude_KB.shape[1] - k
    if _has_numpy(magnitude_KB):
        return torch.from_numpy(np.partition(magnitude_KB.numpy(), place, axis=1)[:, place : place + 1])
    return magnitude_KB.topk(k, dim=1, sorted=True).values[:, -1:]


def _places(taken_KB: Tensor) -> Tensor:
    """Places of true elements in the flattened matrix, int64."""
    if _has_numpy(taken_KB):
        return torch.from_numpy(np.flatnonzero(taken_KB.numpy()))
    return taken_KB.flatten().nonzero().flatten()


def _drop_ties(taken_KB: Tensor, magnitude_KB: Tensor, least_K1: Tensor, k: int) -> None:
    """In rows with more than k taken, keep only the first of those that equal the least."""
    row = (taken_KB.sum(1) > k).nonzero().flatten()
    above = magnitude_KB[row] > least_K1[row]
    equal = magnitude_KB[row] == least_K1[row]
    room = k - above.sum(1, keepdim=True)
    taken_KB[row] = above | (equal & (equal.cumsum(1) <= room))
