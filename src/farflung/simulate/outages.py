"""Outages that befall several islands at once: who is struck, when and by how much."""

import numpy as np

from farflung.simulate.cluster import Cluster
from farflung.simulate.life import Strike


def strikes(
    cluster: Cluster, num_islands: int, horizon_s: float, rng: np.random.Generator
) -> list[list[Strike]]:
    """What befalls each island, by time.

    A domain fails at random moments, Poisson with mean gap `mtbi_s`; while it is dark it does not fail again.
    """
    found: list[list[Strike]] = [[] for _ in range(num_islands)]
    for outage in cluster.outages:
        for domain in range(outage.num_domains):
            now = 0.0
            while (now := now + rng.exponential(outage.mtbi_s)) < horizon_s:
                until = now + float(outage.lasts.draw(rng, 1)[0])
                for island in range(num_islands):
                    share = overlap(island, num_islands, domain, outage.num_domains)
                    if share > 0:
                        found[island].append(Strike(now, until, share))
                now = until
    return [sorted(own, key=lambda strike: strike.at_s) for own in found]


def overlap(island: int, num_islands: int, domain: int, num_domains: int) -> float:
    """Which share of an island's chips lies in a domain.

    >>> overlap(0, 1, 2, 4), overlap(3, 8, 1, 4), overlap(3, 8, 0, 4)
    (0.25, 1.0, 0.0)
    """
    first, last = (
        max(island / num_islands, domain / num_domains),
        min((island + 1) / num_islands, (domain + 1) / num_domains),
    )
    share = (last - first) * num_islands
    return share if share > 1e-9 else 0.0
