"""DecentLaM (arXiv 2104.11981): momentum on what a step and its mixing did together."""

from typing import Any

from farflung.methods.base import Method
from farflung.methods.gossip import gossip_method, gossip_policy, offer_live, refuse_unused
from farflung.methods.noloco import at_rest, heavy_ball

DEFAULTS = {"matching": "random", "sync_every_steps": 1, "outer_momentum": 0.5}


def decentlam(**overrides: Any) -> Method:
    """DecentLaM: ``gt = (x - M(x - lr g)) / lr;  m <- mu m + gt;  x <- x - lr m``.

    On drifts, with ``u = -lr m`` and x the live value after the local steps:

        u <- mu u + (M x - base);  x <- base + u

    The same numbers at a constant lr with plain SGD and H = 1; under a schedule the printed rule rescales its
    buffer with lr and this one does not. It is NoLoCo with b = 1. mu = 0.9, as usual, suits a fixed graph
    (``matching = "ring"``); on random pairs, the default here, learners diverge from about 0.7 on, so mu is 0.5.

    Args:
        **overrides: fields of `farflung.protocol.policy.Policy`.

    Raises:
        ValueError: an unknown field, one that has no effect, or a value that is refused.

    >>> decentlam().policy.outer_momentum
    0.5
    """
    policy = gossip_policy("decentlam", DEFAULTS, overrides)
    refuse_unused(policy, "outer_lr", "momentum_on")
    return gossip_method(
        policy, contribute=offer_live, adopt=heavy_ball(1.0, policy.outer_momentum), init=at_rest
    )
