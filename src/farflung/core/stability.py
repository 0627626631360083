"""When gossip with momentum converges in disagreement: the mean may look healthy while members drift apart.

With g = 0, the disagreement ``y`` of the members (what is left of them without their mean) follows (GASLoC,
arXiv 2606.11081; Lambda_t as in `farflung.core.mixing`)

    V1, momentum_on = "local":    y' = y - alpha Lambda_t y + gamma (y - y_prev)
    V2, momentum_on = "mixed":    z = (I - alpha Lambda_t) y;    y' = z + gamma (z - z_prev)

On the state ``s = (y, y_prev)`` or ``(y, z_prev)`` a round is ``s' = F(Lambda_t) s`` with ``F(mu) = F0 + mu F1``,
two 2 x 2 matrices. All that is needed follows from them:

* A graph that is fixed, or whose rounds commute (hypercube): ``F(mu)`` per eigenvalue mu; the contraction factor
  is the spectral radius of the product over a period, to the power 1/period.
* Random matchings, every member equal and every round drawn anew: ``E[Lambda] = a P`` and ``E[Lambda^2] = b P``, P
  the projection on disagreement, ``a = tr Lambda / (n - 1)``, ``b = tr Lambda^2 / (n - 1)``. So the members'
  moments ``S = sum_i s_i s_i^T`` (2 x 2) follow ``S' = F0 S F0^T + a (F0 S F1^T + F1 S F0^T) + b F1 S F1^T``
  exactly; the mean square contracts by the spectral radius of this 4 x 4 map, the factor is its root.
  Pairs: Lambda is a projection of rank floor(n/2), so a = b. Random rings: a = b = 2n / 3(n - 1).
* Other periodic sequences: the product of the 2n x 2n matrices themselves.

n: members. mu: an eigenvalue of Lambda. d: log2 n.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from farflung.core import mixing
from farflung.errors import did_you_mean

MomentumOn = Literal["local", "mixed"]
Matrix = NDArray[np.float64]

LARGEST_DENSE = 32
"""Sequences without a closed form are judged at most at this n, 33 if n is odd. Stability is lost in the modes
that mix fastest, neighbours against each other: for "ring_pairs" the bound of a larger n (to 53 measured) is equal
or higher. Only the slowest modes of a larger n contract slower than the rate says."""
RESOLUTION = 1e-3
SCAN = 0.02
"""Step of the search for the first instability where stable alphas need not be one interval: an odd number of
members on "ring_pairs" has narrow resonances."""


def rate(matching: str, gamma: float, alpha: float, n: float, momentum_on: MomentumOn = "local") -> float:
    """Return the factor by which disagreement contracts in a round without gradients; below 1: stable.

    Exact in mean square for "random" and "random2", exact for every fixed graph, "hypercube" and, up to n = 33,
    for "ring_pairs". For "bandwidth" it is the worst of members who meet random partners every round, every
    2nd, 4th, 8th, since speeds are not known here. Other random matchings are judged as "random".

    Args:
        matching: a name in `farflung.core.mixing.MATCHINGS`.
        gamma: outer momentum, at least 0.
        alpha: gossip step ("mixing"), at least 0.
        n: members; math.inf for the limit. One alone has no disagreement: 0.
        momentum_on: V1 "local", V2 "mixed".

    Raises:
        ValueError: a name is unknown, or the matching not defined for n.

    >>> round(rate("ring", 0.6, 1.0, 16), 3), round(rate("random", 0.9, 1.0, 8), 3)
    (0.781, 1.08)
    """
    mixing.matcher_of(matching)
    if momentum_on not in _FORMS:
        raise ValueError(f"momentum_on = {momentum_on!r}: unknown{did_you_mean(momentum_on, _FORMS)}")
    f0, f1 = _FORMS[momentum_on](gamma, alpha)
    if n < 2:
        return 0.0
    if matching in _MODES:
        return _rate_of_modes(f0, f1, _MODES[matching](_finite(n)))
    if mixing.is_random(matching):
        return max(_rate_by_chance(f0, f1, mean, every) for mean, every in _MEANS.get(matching, _pairs)(n))
    return _rate_of_product(f0, f1, _dense(matching, _capped(n)))


@lru_cache(maxsize=256)
def largest_stable_mixing(matching: str, gamma: float, n: float, momentum_on: MomentumOn = "local") -> float:
    """Return the alpha up to which `rate` is below 1, from below to 1e-3; 0 if there is none, inf for n = 1.

    >>> round(largest_stable_mixing("random", 0.9, 8), 2)
    0.44
    """
    if n < 2:
        return math.inf
    step = 1.0 if matching in _MODES or mixing.is_random(matching) else SCAN
    low = 0.0
    while rate(matching, gamma, low + step, n, momentum_on) < 1:
        low += step
    high = low + step
    while high - low > RESOLUTION:
        middle = (low + high) / 2
        if rate(matching, gamma, middle, n, momentum_on) < 1:
            low = middle
        else:
            high = middle
    return low


def check(
    matching: str, gamma: float, alpha: float, n: float, momentum_on: MomentumOn = "local"
) -> str | None:
    """Return None if the setting is stable, else one line that names it and the bound.

    ``alpha = 0`` is n independent runs: nothing mixes, nothing diverges.

    >>> check("random", 0.5, 0.75, 8)
    >>> check("ring", 0.9, 1.1, 8, "mixed")  # doctest: +NORMALIZE_WHITESPACE
    "outer_momentum = 0.9 with mixing = 1.1 diverges in disagreement for 8 learners (matching = 'ring',
    momentum_on = 'mixed'): largest stable mixing is 1.01; lower mixing or outer_momentum"
    """
    if (alpha == 0 and gamma < 1) or rate(matching, gamma, alpha, n, momentum_on) < 1:
        return None
    bound = largest_stable_mixing(matching, gamma, n, momentum_on)
    lower = "mixing or outer_momentum" if bound > 0 else "outer_momentum"
    return (
        f"outer_momentum = {gamma} with mixing = {alpha} diverges in disagreement for {n} learners "
        f"(matching = {matching!r}, momentum_on = {momentum_on!r}): "
        f"largest stable mixing is {math.floor(bound * 100) / 100:.2f}; lower {lower}"
    )


def _local(gamma: float, alpha: float) -> tuple[Matrix, Matrix]:
    """F0, F1 of V1 on (y, y_prev)."""
    return np.array([[1 + gamma, -gamma], [1, 0]]), np.array([[-alpha, 0], [0, 0.0]])


def _mixed(gamma: float, alpha: float) -> tuple[Matrix, Matrix]:
    """F0, F1 of V2 on (y, z_prev)."""
    return np.array([[1 + gamma, -gamma], [1, 0]]), np.array([[-alpha * (1 + gamma), 0], [-alpha, 0.0]])


_FORMS: dict[str, Callable[[float, float], tuple[Matrix, Matrix]]] = {"local": _local, "mixed": _mixed}


def _radius(matrices: Matrix) -> float:
    return float(np.abs(np.linalg.eigvals(matrices)).max())


# Rounds that commute: the non-zero eigenvalues of Lambda, [period, modes]


def _rate_of_modes(f0: Matrix, f1: Matrix, mu_TM: Matrix) -> float:
    product: Matrix = np.eye(2)
    for mu_M in mu_TM:
        product = (f0 + mu_M[:, None, None] * f1) @ product
    return float(_radius(product) ** (1 / len(mu_TM)))


def _ring(n: int) -> Matrix:
    if n == 2:
        return np.ones((1, 1))
    return (2 - 2 * np.cos(2 * np.pi * np.arange(1, n // 2 + 1) / n))[None] / 3


def _exponential(n: int) -> Matrix:
    if n & (n - 1) == 0:
        d = n.bit_length() - 1
        return 2 * np.arange(1, d + 1)[None] / (d + 1)
    offsets = np.array(mixing.exponential_offsets(n))
    turns = np.outer(np.arange(1, n // 2 + 1), offsets) / n
    mu_M: Matrix = (1 - np.cos(2 * np.pi * turns)).sum(1) / (len(offsets) + 1)
    return mu_M[None]


def _hypercube(n: int) -> Matrix:
    """In Walsh mode s, round t has eigenvalue 1 if bit t of s is set, else 0."""
    mixing.require_power_of_two(n)
    d = n.bit_length() - 1
    return (np.arange(1, n)[None] >> np.arange(d)[:, None] & 1).astype(float)


_MODES: dict[str, Callable[[int], Matrix]] = {
    "ring": _ring,
    "exponential": _exponential,
    "hypercube": _hypercube,
    "complete": lambda n: np.ones((1, 1)),
}


def _finite(n: float) -> int:
    return 4096 if n == math.inf else int(n)


# Matchings by chance: (a = b, every how many rounds)


def _rate_by_chance(f0: Matrix, f1: Matrix, mean: float, every: int) -> float:
    """Mean-square factor a round, where one round in `every` mixes and the others only have momentum."""
    cross = np.kron(f0, f1) + np.kron(f1, f0)
    mixes = np.kron(f0, f0) + mean * (cross + np.kron(f1, f1))
    idles = np.kron(f0, f0)
    return float(_radius(mixes @ np.linalg.matrix_power(idles, every - 1)) ** (0.5 / every))


def _pairs(n: float) -> list[tuple[float, int]]:
    return [(0.5 if n == math.inf else n // 2 / (n - 1), 1)]


def _rings(n: float) -> list[tuple[float, int]]:
    if n == 2:
        return _pairs(n)
    return [(2 / 3 if n == math.inf else 2 * n / (3 * (n - 1)), 1)]


def _classes(n: float) -> list[tuple[float, int]]:
    return _pairs(n) + [(0.5, 1 << k) for k in range(1, mixing.SLOWEST_EVERY.bit_length())]


_MEANS: dict[str, Callable[[float], list[tuple[float, int]]]] = {
    "random": _pairs,
    "random2": _rings,
    "bandwidth": _classes,
}


# Other periodic sequences


def _rate_of_product(f0: Matrix, f1: Matrix, lambda_TNN: Matrix) -> float:
    """Spectral radius on disagreement of the product over a period, to the power 1/period."""
    n = lambda_TNN.shape[1]
    product: Matrix = np.kron(np.eye(2), np.eye(n) - 1 / n)
    for lambda_NN in lambda_TNN:
        product = (np.kron(f0, np.eye(n)) + np.kron(f1, lambda_NN)) @ product
    return float(_radius(product) ** (1 / len(lambda_TNN)))


def _capped(n: float) -> int:
    return int(n) if n <= LARGEST_DENSE else LARGEST_DENSE + (n != math.inf and int(n) % 2)


@lru_cache(maxsize=32)
def _dense(matching: str, n: int) -> Matrix:
    """Lambda of each round of a period, [T, n, n]."""
    members = mixing.Members.of(f"{i:04}" for i in range(n))
    period = mixing.matcher_of(matching).period
    rounds = range(period(n) if period else 1)
    return np.array([mixing.laplacian(matching, 0, t, members) for t in rounds])
