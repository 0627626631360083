"""Who meets whom in a gossip round: a pure function of (seed, round, members), the same at every member.

Members mix by ``M = I - alpha Lambda`` with the round's Laplacian ``Lambda = 1/2 sum_ij lambda_ij (e_i - e_j)
(e_i - e_j)^T``, each undirected edge counted once (GASLoC, arXiv 2606.11081). An edge's *weight* here is
``lambda_ij / 2``, the entry M_ij at alpha = 1: a pair alone has 1/2, so that alpha = 1 averages it exactly.
Every matching is undirected, so M is symmetric and its rows sum to 1: the mean of the members never moves.

Torch-free, and numpy is loaded only for matrices: a sidecar needs nothing but `partners`.

n: members. Members are numbered by their sorted names. i, j: two of them. t: the round.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, Protocol

from farflung.errors import did_you_mean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SLOWEST_EVERY = 8
"""The slowest links of matching "bandwidth" take part in every 8th round; rarer, and momentum has to be so low
that nothing is gained (see `farflung.core.stability`)."""

Edge = tuple[int, int, float]
Partner = tuple[int, float]
Graph = tuple[tuple[Partner, ...], ...]


@dataclass(frozen=True, eq=False)
class Members:
    """Who takes part, and how fast their links are; equal if both are, at the price of comparing two digests.

    Args:
        names: sorted, each once.
        mbps: declared link speed of each, above 0, None where it is not known; empty if it is for nobody.

    Raises:
        ValueError: names are not sorted or not unique, or speeds do not fit.

    >>> Members.of({"b": 100.0, "a": None})
    Members(names=('a', 'b'), mbps=(None, 100.0))
    >>> Members.of(["a", "b"]).digest
    '57346f18'
    """

    names: tuple[str, ...]
    mbps: tuple[float | None, ...] = ()
    digest: str = field(init=False, repr=False)  # eight hex digits, to name the set in messages and tapes
    _key: bytes = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if any(a >= b for a, b in zip(self.names, self.names[1:], strict=False)):
            raise ValueError(f"names = {_shown(self.names)}: must be sorted, each name once")
        if self.mbps and len(self.mbps) != len(self.names):
            raise ValueError(
                f"mbps = {_shown(self.mbps)}: must have a speed for each of {len(self.names)} names"
            )
        for name, mbps in zip(self.names, self.mbps, strict=False):
            if mbps is not None and not 0 < mbps < math.inf:
                raise ValueError(f"mbps of {name} = {mbps}: must be above 0, or None")
        speeds = [None if mbps is None else float(mbps) for mbps in self.mbps]
        key = hashlib.blake2b(repr((self.names, speeds)).encode(), digest_size=16).digest()
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", int.from_bytes(key[:7]))
        object.__setattr__(self, "digest", key[:4].hex())

    @classmethod
    def of(cls, names: Iterable[str] | Mapping[str, float | None]) -> "Members":
        """The members of these names, in any order; a mapping also says their speeds."""
        ordered = tuple(sorted(set(names)))
        return cls(ordered, tuple(names[name] for name in ordered) if isinstance(names, Mapping) else ())

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Members) and self._key == other._key

    def __len__(self) -> int:
        return len(self.names)


class Edges(Protocol):
    """The edges of one round: a pure function that yields each undirected edge ``(i, j, weight)`` once.

    Weights are positive and those at one member sum to at most 1. It may use no chance beyond what it derives
    from (seed, round, names), as `shuffled` does, and nothing that members do not agree on.
    """

    def __call__(self, n: int, seed: int, round: int, members: Members) -> Iterable[Edge]:
        """Yield the edges among members 0 to n - 1."""
        ...


@dataclass(frozen=True, kw_only=True)
class Matcher:
    """A matching: add one to `MATCHINGS` under its name.

    Args:
        edges: the edges of a round.
        max_degree: n -> the most partners a member can have in a round.
        period: n -> rounds after which the edges repeat, whatever the seed (1: a fixed graph); None: they are
            drawn anew each round, from the seed.
    """

    edges: Edges
    max_degree: Callable[[int], int]
    period: Callable[[int], int] | None = None


def partners(matching: str, seed: int, round: int, members: Members, name_index: int) -> tuple[Partner, ...]:
    """Return one member's partners in a round, in sorted order: ``((j, M_ij), ...)``, empty if it idles.

    Args:
        matching: a name in `MATCHINGS`.
        seed: the run's; only matchings by chance use it.
        round: the round, from 0.
        members: all who may meet.
        name_index: the member, as an index into ``members.names``.

    Raises:
        ValueError: the matching is unknown, or not defined for that many members.

    >>> partners("ring", 0, 0, Members.of("abcd"), 0)
    ((1, 0.3333333333333333), (3, 0.3333333333333333))
    >>> [partners("random", 7, t, Members.of("abc"), 0) for t in range(3)]
    [(), ((2, 0.5),), ((2, 0.5),)]
    """
    return graph(matching, seed, round, members)[name_index]


@lru_cache(maxsize=16)
def graph(matching: str, seed: int, round: int, members: Members) -> Graph:
    """Return `partners` of every member. Rounds with the same edges share one object."""
    matcher, n = matcher_of(matching), len(members)
    if n < 2:
        return ((),) * n
    if matcher.period is not None:
        first = (0, round % matcher.period(n))
        if first != (seed, round):
            return graph(matching, *first, members)
    lists: list[list[Partner]] = [[] for _ in range(n)]
    for i, j, weight in matcher.edges(n, seed, round, members):
        lists[i].append((j, weight))
        lists[j].append((i, weight))
    return tuple(tuple(sorted(entries)) for entries in lists)


def matcher_of(matching: str) -> Matcher:
    """Return the matcher of that name; ValueError if there is none."""
    if matching not in MATCHINGS:
        raise ValueError(f"matching = {matching!r}: unknown{did_you_mean(matching, MATCHINGS)}")
    return MATCHINGS[matching]


def max_degree(matching: str, n: int) -> int:
    """Return the most partners that a member can have in a round.

    >>> max_degree("random", 8), max_degree("exponential", 8), max_degree("complete", 8), max_degree("ring", 2)
    (1, 3, 7, 1)
    """
    return matcher_of(matching).max_degree(n)


def is_random(matching: str) -> bool:
    """Return whether the edges follow from the seed, a new draw each round.

    >>> is_random("random"), is_random("hypercube")
    (True, False)
    """
    return matcher_of(matching).period is None


def fitting(matching: str, n: int, most: int) -> str:
    """Return the matching, or "random" where these members cannot keep to it.

    Members come and go: a hypercube needs a power of two of them, and nobody meets more than `most` a round.

    >>> fitting("hypercube", 8, 64), fitting("hypercube", 7, 64), fitting("complete", 100, 64)
    ('hypercube', 'random', 'random')
    """
    if matching == "hypercube" and not _is_power_of_two(n):
        return "random"
    return matching if max_degree(matching, n) <= most else "random"


# Matchings


def shuffled(indices: Iterable[int], seed: int, round: int, members: Members) -> list[int]:
    """Return members in the order of blake2b over (seed, round, name): chance that all agree on."""
    prefix = hashlib.blake2b(f"{seed}/{round}/".encode(), digest_size=8)

    def draw(i: int) -> bytes:
        own = prefix.copy()
        own.update(members.names[i].encode())
        return own.digest()

    return sorted(indices, key=draw)


def random(n: int, seed: int, round: int, members: Members) -> Iterable[Edge]:
    """One peer: the members in an order by chance, consecutive ones paired, weight 1/2. Odd n: one idles."""
    return _paired(shuffled(range(n), seed, round, members))


def random2(n: int, seed: int, round: int, members: Members) -> Iterable[Edge]:
    """Two peers: a ring through all members in an order by chance, weights 1/3.

    For even n from 4 these are two perfect matchings without a shared edge; for odd n everyone has two peers
    all the same. n = 3 is the complete graph, n = 2 one pair.
    """
    return _ringed(shuffled(range(n), seed, round, members))


def ring(n: int, seed: int, round: int, members: Members) -> Iterable[Edge]:
    """Neighbours in name order, all edges each round, weights 1/3; n = 2 is a pair, weight 1/2."""
    return _ringed(range(n))


def ring_pairs(n: int, seed: int, round: int, members: Members) -> Iterable[Edge]:
    """The ring's even edges, then its odd edges, weights 1/2. Odd n: the start moves on by 1, one idles."""
    start = round % n if n % 2 else round % 2
    return _paired([(start + k) % n for k in range(n)][: n - n % 2])


def exponential(n: int, seed: int, round: int, members: Members) -> Iterable[Edge]:
    """The exponential graph, undirected, all edges each round, weights 1/(degree + 1).

    The literature's graph is directed: i sends to ``i + 2^k mod n``, weights ``1 / (log2 n + 1)``. For n a power
    of two we read ``i XOR 2^k`` instead, which is undirected and keeps degree log2 n, weights, and spectral gap
    ``2 / (log2 n + 1)``. For other n: ``i + 2^k`` and ``i - 2^k mod n`` for all ``2^k < n``, so about twice
    the degree, with Metropolis weights.
    """
    if _is_power_of_two(n):
        offsets = [1 << k for k in range(_log2(n))]
        return [(i, i ^ o, 1 / (len(offsets) + 1)) for i in range(n) for o in offsets if i < i ^ o]
    steps = exponential_offsets(n)
    return [(i, (i + s) % n, 1 / (len(steps) + 1)) for i in range(n) for s in steps if i < (i + s) % n]


def hypercube(n: int, seed: int, round: int, members: Members) -> Iterable[Edge]:
    """One peer ``i XOR 2^(t mod log2 n)``, weight 1/2: alpha = 1 averages exactly in log2 n rounds (gamma = 0).

    Raises:
        ValueError: n is not a power of two.
    """
    require_power_of_two(n)
    bit = 1 << round % _log2(n)
    return [(i, i ^ bit, 0.5) for i in range(n) if i < i ^ bit]


def complete(n: int, seed: int, round: int, members: Members) -> Iterable[Edge]:
    """Everyone with everyone, weight 1/n: alpha = 1 is an all-reduce. n(n - 1)/2 edges: for small n."""
    return ((i, j, 1 / n) for i, j in combinations(range(n), 2))


def bandwidth(n: int, seed: int, round: int, members: Members) -> Iterable[Edge]:
    """Random pairs that slow links do not hold up: alike meets alike, and slow members meet less often.

    If everyone talked every round, the slowest link would bound the speed of all. So:

    1. A member's class is ``k = floor(log2(fastest speed / own speed))``, from 0 to 3; unknown is the fastest.
    2. Class k takes part in rounds ``t mod 2^k == 0``: every round, every 2nd, 4th, 8th. Its share of a round's
       transfer time is thereby that of class 0 (up to 8 times slower). Others idle.
    3. Those who take part are sorted by class, by chance within a class, and consecutive ones paired, weight
       1/2. If they are odd in number, the first, one of the fastest, idles.
    4. Where a border between classes falls between pairs, the two members beside it change places in every
       2nd meeting of the slower class. So every border is crossed at least once in ``2^(k + 1)`` rounds, and the
       union of the graphs over time is connected.

    Without speeds, or with speeds within a factor of 2, this is "random".
    """
    ks = speed_classes(members)
    active = [i for i in shuffled(range(n), seed, round, members) if round % (1 << ks[i]) == 0]
    order = sorted(active, key=lambda i: ks[i])[len(active) % 2 :]
    borders = [p for p in range(2, len(order), 2) if ks[order[p - 1]] < ks[order[p]]]
    for p in [p for p in borders if round >> ks[order[p]] & 1]:
        order[p - 1], order[p] = order[p], order[p - 1]
    return _paired(order)


@lru_cache(maxsize=128)
def speed_classes(members: Members) -> tuple[int, ...]:
    """Return each member's class k of matching "bandwidth": it takes part in every ``2^k``-th round.

    >>> speed_classes(Members.of({"a": 1000.0, "b": 600.0, "c": 300.0, "d": 10.0, "e": None}))
    (0, 0, 1, 3, 0)
    """
    speeds = members.mbps or (None,) * len(members)
    fastest = max((mbps for mbps in speeds if mbps is not None), default=1.0)
    slowest = _log2(SLOWEST_EVERY)
    return tuple(min(slowest, math.frexp(fastest / (mbps or fastest))[1] - 1) for mbps in speeds)


def exponential_offsets(n: int) -> list[int]:
    """Return ``j - i mod n`` of the neighbours j in "exponential" where n is not a power of two.

    >>> exponential_offsets(12)
    [1, 2, 4, 8, 10, 11]
    """
    powers = [1 << k for k in range((n - 1).bit_length())]
    return sorted({o % n for p in powers for o in (p, -p)})


def _fixed(n: int) -> int:
    return 1


MATCHINGS: dict[str, Matcher] = {
    "random": Matcher(edges=random, max_degree=lambda n: min(1, n - 1)),
    "random2": Matcher(edges=random2, max_degree=lambda n: min(2, n - 1)),
    "bandwidth": Matcher(edges=bandwidth, max_degree=lambda n: min(1, n - 1)),
    "ring": Matcher(edges=ring, max_degree=lambda n: min(2, n - 1), period=_fixed),
    "ring_pairs": Matcher(
        edges=ring_pairs, max_degree=lambda n: min(1, n - 1), period=lambda n: n if n % 2 else 2
    ),
    "exponential": Matcher(
        edges=exponential,
        max_degree=lambda n: _log2(n) if _is_power_of_two(n) else len(exponential_offsets(n)),
        period=_fixed,
    ),
    "hypercube": Matcher(
        edges=hypercube, max_degree=lambda n: min(1, n - 1), period=lambda n: max(1, _log2(n))
    ),
    "complete": Matcher(edges=complete, max_degree=lambda n: n - 1, period=_fixed),
}


def _paired(order: Sequence[int]) -> Iterator[Edge]:
    return ((i, j, 0.5) for i, j in zip(order[::2], order[1::2], strict=False))


def _ringed(order: Sequence[int]) -> Iterator[Edge]:
    if len(order) < 3:
        return _paired(order)
    return ((i, order[(k + 1) % len(order)], 1 / 3) for k, i in enumerate(order))


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _log2(n: int) -> int:
    return max(0, n.bit_length() - 1)


def require_power_of_two(n: int) -> None:
    if not _is_power_of_two(n):
        raise ValueError(
            f"matching = 'hypercube' with {n} members: their number must be a power of two; "
            "use 'random' or 'exponential'"
        )


def _shown(values: Sequence[object]) -> str:
    text = repr(values)
    return text if len(text) <= 80 else f"{text[:77]}..."


# Matrices


def laplacian(matching: str, seed: int, round: int, members: Members) -> "NDArray[np.float64]":
    """Return Lambda of a round, float64 [n, n]: symmetric, positive semidefinite, rows sum to 0.

    >>> laplacian("ring", 0, 0, Members.of("abc")).diagonal().round(3).tolist()
    [0.667, 0.667, 0.667]
    """
    import numpy as np

    lambda_NN = np.zeros((len(members), len(members)))
    for i, entries in enumerate(graph(matching, seed, round, members)):
        for j, weight in entries:
            lambda_NN[i, j] = -weight
        lambda_NN[i, i] = math.fsum(weight for _, weight in entries)
    return lambda_NN


def mixing_matrix(
    matching: str, seed: int, round: int, members: Members, alpha: float = 1.0
) -> "NDArray[np.float64]":
    """Return ``M = I - alpha Lambda`` of a round, float64 [n, n]: symmetric, rows sum to 1.

    >>> mixing_matrix("hypercube", 0, 0, Members.of("ab"), alpha=0.5).tolist()
    [[0.75, 0.25], [0.25, 0.75]]
    """
    import numpy as np

    return np.eye(len(members)) - alpha * laplacian(matching, seed, round, members)


def metropolis(adjacency: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """Return the Metropolis mixing matrix of any undirected graph: ``M_ij = 1 / (1 + max(degree_i, degree_j))``.

    Args:
        adjacency: [n, n], symmetric; what is not zero off the diagonal is an edge.

    Raises:
        ValueError: it is not symmetric.

    >>> import numpy as np
    >>> metropolis(np.array([[0.0, 1.0], [1.0, 0.0]])).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    import numpy as np

    if not np.array_equal(adjacency, adjacency.T):
        raise ValueError("adjacency: must be symmetric, gossip goes both ways")
    edges_NN = (adjacency != 0) & ~np.eye(len(adjacency), dtype=bool)
    degree_N = edges_NN.sum(1)
    m_NN = np.where(edges_NN, 1 / (1 + np.maximum.outer(degree_N, degree_N)), 0.0)
    return m_NN + np.diag(1 - m_NN.sum(1))


def spectrum(laplacian: "NDArray[np.float64]") -> tuple[float, float]:
    """Return ``(chi_1, chi_2)`` of a Laplacian: what gossip needs in rounds is about ``sqrt(chi_1 chi_2)``.

    ``chi_1 = 1 / lambda_2``, the inverse spectral gap. ``chi_2 = 1/2 max_(i,j) (e_i - e_j)^T Lambda^+ (e_i -
    e_j)`` over the edges: the largest effective resistance of an edge, conductances lambda_ij (as in A2CiD2,
    arXiv 2306.08289). ``chi_2 <= chi_1``. A graph that is not connected has (inf, inf); n = 1 has (0, 0).

    >>> [round(chi, 9) for chi in spectrum(laplacian("complete", 0, 0, Members.of("abcd")))]
    [1.0, 1.0]
    """
    import numpy as np

    n = len(laplacian)
    if n < 2:
        return 0.0, 0.0
    second = float(np.linalg.eigvalsh(laplacian)[1])
    if second < 1e-10:
        return math.inf, math.inf
    inverse_NN = np.linalg.pinv(laplacian, hermitian=True)
    diagonal_N = inverse_NN.diagonal()
    resistance_NN = (diagonal_N[:, None] + diagonal_N[None, :] - 2 * inverse_NN) / 2
    edges_NN = (laplacian != 0) & ~np.eye(n, dtype=bool)
    return 1 / second, float(resistance_NN[edges_NN].max())


def best_momentum(mu_min: float) -> float:
    """Return the gamma that contracts fastest on a fixed graph: ``(1 - sqrt(mu_min))^2`` (heavy ball, V1).

    Args:
        mu_min: smallest non-zero eigenvalue of alpha Lambda, in [0, 1].

    >>> best_momentum(0.25)
    0.25
    """
    return (1 - math.sqrt(mu_min)) ** 2
