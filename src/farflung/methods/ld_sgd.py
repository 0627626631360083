"""LD-SGD (arXiv 1910.09126): H local steps, then average the parameters with partners."""

from typing import Any

from farflung.methods.base import Method
from farflung.methods.dsgd import averaging

DEFAULTS = {"matching": "random", "sync_every_steps": 24}


def ld_sgd(**overrides: Any) -> Method:
    """LD-SGD: H steps ``x <- x - lr u``, then ``x <- M x``, M the mixing matrix of the round.

    The paper alternates I1 local steps with I2 steps that mix each time; this is I2 = 1, one exchange in H
    steps, and GASLoC with gamma = 0 and eta = 1. H = 24 is chosen here.

    Args:
        **overrides: fields of `farflung.protocol.policy.Policy`.

    Raises:
        ValueError: an unknown field, one that has no effect, or a value that is refused.

    >>> ld_sgd(sync_every_steps=4).policy.mixing
    1.0
    """
    return averaging("ld_sgd", DEFAULTS, overrides)
