"""DCT-decoupled momentum with one shared model: arXiv 2510.03371's compression, with replicas that agree."""

from typing import Any

from farflung.methods.base import Method
from farflung.methods.compressed import compressed_method

DEFAULTS = {
    "sync_every_steps": 128,
    "codec": "dct-top32-int8-12bit",
    "buffer_decay": 1.0,
    "outer": "nesterov",
    "outer_lr": 0.5,  # eta
    "outer_momentum": 0.8,  # mu
}
"""H and k are the paper's; eta, mu and beta the first setting tried on a small model."""


def dct_momentum_shared(**overrides: Any) -> Method:
    """DCT coefficients with error feedback, and one Nesterov step that all share: a variant of `dct_momentum`.

        m <- beta m + (Theta - theta);   q = IDCT(top32(DCT(m)));   m <- m - q
        b <- mu b + mean q;   Theta <- Theta - eta (mean q + mu b)

    With every coefficient sent, ``codec = "dct-all-fp32"``, this is DiLoCo. Where the authors' rule keeps a
    momentum at each learner and lets replicas differ, momentum is the hub's here and m holds what was not
    sent.

    Args:
        **overrides: fields of `farflung.protocol.policy.Policy`; `buffer_decay` is beta.

    Raises:
        ValueError: an unknown field, or a value that is refused.

    >>> dct_momentum_shared().policy.outer
    'nesterov'
    """
    return compressed_method("dct_momentum_shared", DEFAULTS, overrides)
