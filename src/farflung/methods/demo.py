"""DeMo (arXiv 2411.19870): the fast part of the momentum travels at every step, and only signs are stepped."""

from typing import Any

from farflung.methods.base import Method
from farflung.methods.compressed import compressed_method

DEFAULTS = {
    "sync_every_steps": 1,
    "codec": "dct-top32-fp32-12bit",
    "buffer_decay": 0.999,
    "outer": "sign",
    "outer_lr": 1e-3,
    "outer_momentum": 0.0,
}


def demo(**overrides: Any) -> Method:
    """Decoupled momentum: the largest DCT coefficients leave the buffer, and the sign of their mean is the step.

        m <- beta m + (Theta - theta);   q = IDCT(top32(DCT(m)));   m <- m - q;   Theta <- Theta - lr sign(mean q)

    H = 1, beta .999, k = 32 of 64 x 64. The learner's step ``Theta - theta`` stands for the paper's lr x
    gradient: the same with plain SGD inside; under AdamW the buffer holds AdamW's steps. Its size has no
    effect on the sign, so `outer_lr` alone says how far a step goes: a constant, which no schedule of the
    learners lowers. The mean and its sign are taken once, at the hub, so that no order of sums lets replicas
    drift apart.

    Args:
        **overrides: fields of `farflung.protocol.policy.Policy`; `buffer_decay` is beta, `outer_lr` the
        paper's lr.

    Raises:
        ValueError: an unknown field, or a value that is refused.

    >>> demo().outer
    Sign(lr=0.001)
    """
    return compressed_method("demo", DEFAULTS, overrides)
