"""GASLoC (arXiv 2606.11081): local steps, sparse gossip, and an outer momentum that speeds up the gossip."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farflung.core import stability
from farflung.methods.base import Contribution, Local, Method, State
from farflung.methods.gossip import gossip_method, gossip_policy, refuse_unused, settled

DEFAULTS = {
    "matching": "random",
    "sync_every_steps": 24,
    "outer_lr": 0.7,  # eta
    "outer_momentum": 0.7,  # gamma
    "mixing": 0.6,  # alpha
    "momentum_on": "mixed",
}
"""Not the paper's, which are not known: the better of two settings tried on a small model."""


def gasloc(**overrides: Any) -> Method:
    """GASLoC: offer ``y_t = theta_t + eta g_t``, g the drift of the H local steps, and take one outer step.

    With Lambda the weighted Laplacian of the round's graph, and ``alpha Lambda y`` the correction c:

        "local", the paper's (V1)   theta' = y_t - c_t + gamma (y_t - y_{t-1}),                   y_{-1} = theta_0
        "mixed" (V2)                theta' = z_t + gamma (z_t - z_{t-1}),      z_t = y_t - c_t,   z_{-1} = theta_0

    Both in buffer form, v the difference in brackets; they differ in which correction it holds:

        v <- gamma v + eta g - (c_{t-1} if "local" else c_t)
        theta <- theta + eta g - c_t + gamma v

    As the corrections of all learners sum to zero, their mean moves like SGD(lr=eta, momentum=gamma,
    nesterov=True) on the mean pseudo-gradient, whatever the graph, the overlap, or the H of each. On the
    complete graph "mixed" is DiLoCo, "local" is so in the mean; one learner is DiLoCo alone; gamma = 0 and
    eta = 1 is LD-SGD. Each undirected edge of Lambda is counted once: `mixing` (alpha) = 1 on a pair is exact
    averaging. On random pairs gamma = 0.9 is stable up to an alpha of about 0.4 ("local") or 0.85 ("mixed") only;
    above it learners drift apart while their mean looks well (`farflung.core.stability`).

    Decided here: a round without a partner takes its outer step with c = 0. With an overlap the correction
    is that of the y offered tau steps before, everything else is of the present y. A joiner takes theta and v of
    a donor; its c ("local") starts at 0, since a copied one would be subtracted twice over all learners.

    Args:
        **overrides: fields of `farflung.protocol.policy.Policy`.

    Raises:
        ValueError: an unknown field, or a value that is refused.

    >>> gasloc(momentum_on="local", outer_momentum=0.5, mixing=0.75).own_state
    ('c',)
    """
    policy = gossip_policy("gasloc", DEFAULTS, overrides)
    refuse_unused(policy)
    local = policy.momentum_on == "local"
    return gossip_method(
        policy,
        contribute=offer(policy.outer_lr),
        adopt=(on_local if local else on_mixed)(policy.outer_lr, policy.outer_momentum),
        init=buffers("v", "c") if local else buffers("v"),
        own_state=("c",) if local else (),
        unstable=lambda n: stability.check(
            policy.matching, policy.outer_momentum, policy.mixing, n, policy.momentum_on
        ),
    )


def buffers(*names: str) -> Callable[[int], State]:
    """State of vectors that start at 0."""
    return lambda num_elements: {name: torch.zeros(num_elements) for name in names}


def offer(eta: float) -> Callable[[Local], Contribution]:
    """``y = theta + eta (x - theta)``, fp32 ``[N]``."""

    def contribute(local: Local) -> Contribution:
        return Contribution(payload=local.base + eta * (local.x - local.base), pending=local.state)

    return contribute


def on_local(eta: float, gamma: float) -> Callable[[Local, Tensor, bool], Local]:
    """The outer step of V1; ``state["c"]`` is the correction of the round before."""

    def adopt(local: Local, correction: Tensor, included: bool) -> Local:
        step = eta * (local.x - local.base)
        v = gamma * local.state["v"] + step - local.state["c"]
        return settled(local, local.base + step - correction + gamma * v, v=v, c=correction.clone())

    return adopt


def on_mixed(eta: float, gamma: float) -> Callable[[Local, Tensor, bool], Local]:
    """The outer step of V2: Nesterov, with the correction as part of the gradient."""

    def adopt(local: Local, correction: Tensor, included: bool) -> Local:
        step = eta * (local.x - local.base) - correction
        v = gamma * local.state["v"] + step
        return settled(local, local.base + step + gamma * v, v=v)

    return adopt
