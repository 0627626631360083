"""NoLoCo (arXiv 2506.10911): random pairs for the all-reduce, and an outer step that pulls a pair together."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farflung.methods.base import Local, Method, State
from farflung.methods.gossip import gossip_method, gossip_policy, offer_live, refuse_unused, settled

DEFAULTS = {"matching": "random", "sync_every_steps": 50, "outer_lr": 0.7, "outer_momentum": 0.5}


def noloco(**overrides: Any) -> Method:
    """NoLoCo's outer step, p_old the slow weights, p the fast ones after H steps, ``mean`` over a random pair:

        m <- mu m + b mean(p - p_old) + b (mean(p_old) - p_old);  p_old <- p_old + m;  p <- p_old

    The paper has one rate for the outer gradient and one for the pull. Here both are b = `outer_lr` = 0.7, as read
    from public code; then the two vectors that a pair would exchange collapse into one, the live p:
    ``m <- mu m + b (mean(p) - p_old)``. mu = `outer_momentum` = 0.5, H = 50, heavy ball rather than Nesterov.
    On random pairs learners diverge from mu of about 0.8 on, so with DiLoCo's 0.9.

    Decided here: with another matching or `mixing`, ``mean`` is that mixing. A round without a partner takes the
    step with its own p. A joiner takes p_old and m of a donor.

    Args:
        **overrides: fields of `farflung.protocol.policy.Policy`.

    Raises:
        ValueError: an unknown field, one that has no effect, or a value that is refused.

    >>> noloco().policy.sync_every_steps
    50
    """
    policy = gossip_policy("noloco", DEFAULTS, overrides)
    refuse_unused(policy, "momentum_on")
    adopt = heavy_ball(policy.outer_lr, policy.outer_momentum)
    return gossip_method(policy, contribute=offer_live, adopt=adopt, init=at_rest)


def at_rest(num_elements: int) -> State:
    """``m = 0``, fp32 ``[N]``."""
    return {"m": torch.zeros(num_elements)}


def heavy_ball(b: float, mu: float) -> Callable[[Local, Tensor, bool], Local]:
    """``m <- mu m + b (x - c - base);  x <- base + m``."""

    def adopt(local: Local, correction: Tensor, included: bool) -> Local:
        m = mu * local.state["m"] + b * (local.x - correction - local.base)
        return settled(local, local.base + m, m=m)

    return adopt
