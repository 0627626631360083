"""What synchronisation costs in bytes: closed forms from payload sizes, for reports, plans and tests.

    all to all    a learner sends (M - 1) payload          arXiv 2510.03371, DeMo: all-gather of payloads
    hub           a learner sends payload, receives value  DiLoCo and its relatives here
    ring          a learner sends 2 (M - 1) / M dense      all-reduce: reduce-scatter, then all-gather

A ring's share of a learner tends to 2 dense as M grows, an all-gather's grows with M: their ratio is
``2 dense / (M payload)``. dense: the parameters in fp32. value: what a hub serves, parameters and buffers in
fp32. payload: what a codec makes of a learner's work. All of one fragment, or all of the sum over fragments.

Bytes of parameters are as given; what a transport adds is `framed_bytes`. M: learners.
"""

from typing import NamedTuple

from farflung.core import mixing
from farflung.units import CHUNK_BYTES, FRAME_BYTES

FP32_BYTES = 4
ROUNDS_SEEN = 8  # of a matching by chance, to say how many partners a learner has


class Load(NamedTuple):
    """Bytes that one learner sends and receives, in one round unless something else is said."""

    up: float
    down: float

    def times(self, factor: float) -> "Load":
        """Of so many rounds, steps or learners."""
        return Load(self.up * factor, self.down * factor)

    def plus(self, other: "Load") -> "Load":
        return Load(self.up + other.up, self.down + other.down)

    @property
    def total(self) -> float:
        return self.up + self.down


NOTHING = Load(0, 0)


def num_chunks(num_bytes: int) -> int:
    """Chunks of an object of so many bytes; an empty object still has one."""
    return max(1, -(-num_bytes // CHUNK_BYTES))


def framed_bytes(num_bytes: int) -> int:
    """An object with its frame headers: what a transfer of it counts.

    >>> framed_bytes(16_000) - 16_000, framed_bytes(2 * CHUNK_BYTES + 1) - 2 * CHUNK_BYTES
    (36, 109)
    """
    return num_bytes + FRAME_BYTES * num_chunks(num_bytes)


def ring(dense_bytes: float, num_learners: int) -> Load:
    """Ring all-reduce (Patarasuk and Yuan 2009): ``2 (M - 1) / M dense`` each way; alone, nothing.

    >>> ring(1000, 4)
    Load(up=1500.0, down=1500.0)
    """
    _check_learners(num_learners)
    each = 2 * (num_learners - 1) / num_learners * dense_bytes
    return Load(each, each)


def partners(payload_bytes: float, num_partners: float) -> Load:
    """Gossip: a payload to each partner, and one from each."""
    return Load(num_partners * payload_bytes, num_partners * payload_bytes)


def all_gather(payload_bytes: float, num_learners: int) -> Load:
    """Everybody's payload to everybody: ``(M - 1) payload`` each way.

    Against a ring this is ``2 dense / (M payload)``:

    >>> ring(4096 * 4, 16).up / all_gather(112, 16).up == 2 * 4096 * 4 / (16 * 112)
    True
    """
    _check_learners(num_learners)
    return partners(payload_bytes, num_learners - 1)


def hub(payload_bytes: float, value_bytes: float) -> Load:
    """One payload up, the merged value down, whatever M is. The hub's own link carries M times that."""
    return Load(payload_bytes, value_bytes)


def data_parallel(dense_bytes: float, num_learners: int, num_steps: float) -> Load:
    """A ring all-reduce of fp32 gradients in every inner step: what all of this is to save."""
    return ring(dense_bytes, num_learners).times(num_steps)


def fewer(reference: float, own: float) -> float | None:
    """How many times fewer bytes: ``reference / own``; None where either is nothing.

    >>> fewer(4096 * 32, 64 * (12 + 2))  # SparseLoCo: 64 of 4096 elements in 2 bits with 12-bit positions
    146.28571428571428
    """
    return reference / own if reference > 0 and own > 0 else None


def mean_partners(matching: str, num_learners: int, most: int) -> float:
    """Partners that a learner has in a round, on average.

    Args:
        matching: a name in `farflung.core.mixing.MATCHINGS`.
        num_learners: M, at least 1.
        most: partners of one round that are allowed; beyond, members meet in random pairs (`mixing.fitting`).

    >>> mean_partners("complete", 16, 64), mean_partners("random", 16, 64), mean_partners("ring", 2, 64)
    (15.0, 1.0, 1.0)
    """
    _check_learners(num_learners)
    members = mixing.Members(tuple(f"{i:09d}" for i in range(num_learners)))
    name = mixing.fitting(matching, num_learners, most)
    graphs = [mixing.graph(name, 0, round, members) for round in range(ROUNDS_SEEN)]
    return sum(len(own) for graph in graphs for own in graph) / (num_learners * len(graphs))


def _check_learners(num_learners: int) -> None:
    if num_learners < 1:
        raise ValueError(f"num_learners = {num_learners}: must be at least 1")
