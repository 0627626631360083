"""AD-PSGD (arXiv 1710.06952): average with a partner while the next gradient is computed."""

from typing import Any

from farflung.methods.base import Method
from farflung.methods.dsgd import averaging

DEFAULTS = {"matching": "random", "sync_every_steps": 1, "overlap_steps": 1}


def ad_psgd(**overrides: Any) -> Method:
    """AD-PSGD, Algorithm 1: ``x <- (x + x_peer) / 2 - lr u(x)``, the update taken at the unmixed x.

    The value at the start of a step is offered and the average applied at its end (H = tau = 1), so the
    exchange hides behind the step: ``x' = live - c``, c from the offered values. The paper lets an active worker
    draw a passive one whenever it is ready; here pairs are drawn by round, so a fast worker waits for its
    partner of that round, and a gradient is one exchange old at most. A fixed bipartite graph, which the paper
    needs against deadlocks, is not needed for the same reason.

    Args:
        **overrides: fields of `farflung.protocol.policy.Policy`.

    Raises:
        ValueError: an unknown field, one that has no effect, or a value that is refused.

    >>> ad_psgd().policy.overlap_steps
    1
    """
    return averaging("ad_psgd", DEFAULTS, overrides)
