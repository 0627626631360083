"""SparseLoCo (arXiv 2508.15706): the largest elements of each chunk, in 2 bits, with error feedback."""

from typing import Any

from farflung.methods.base import Method
from farflung.methods.compressed import compressed_method

DEFAULTS = {
    "codec": "top64-2bit-12bit",
    "outer": "sgd",
    "outer_lr": 0.4,  # alpha
    "outer_momentum": 0.0,
}


def sparseloco(**overrides: Any) -> Method:
    """SparseLoCo: each learner sends 64 of every 4096 elements of its buffer; the mean is the step.

        m <- beta m + (Theta - theta);   q = top64(m);   m <- m - q;   Theta <- Theta - alpha mean q

    H = 30, beta .95, alpha .4, no outer momentum. Values have 2 bits, by the means of four bins 1.5 sigma
    wide, and positions 12: 64 x 14 bits against 4096 x 32 is 146.29x, less the bin means. The paper shares
    these in a tensor; here 256 values do (144x); ``top64-2bitx4096-12bit`` shares them in 4096 (146x).

    ``clip = "median"`` cuts each learner to the median norm of its round, as Covenant-72B does; the default is
    not to, because here it cost loss (docs/results/clip.md). A payload that is not finite is refused.

    Args:
        **overrides: fields of `farflung.protocol.policy.Policy`; `buffer_decay` is beta.

    Raises:
        ValueError: an unknown field, or a value that is refused.

    >>> sparseloco().codec.size_bytes(4096 * 4)  # against 65536
    456
    """
    return compressed_method("sparseloco", DEFAULTS, overrides)
