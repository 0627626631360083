"""GT-DSGDm: gradient tracking (arXiv 1607.03218) with momentum on the tracked direction."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farflung.methods.base import Contribution, Local, Method, State
from farflung.methods.gossip import gossip_method, gossip_policy, refuse_unused, settled

DEFAULTS = {"matching": "random", "sync_every_steps": 1, "outer_momentum": 0.9}


def gt_dsgdm(**overrides: Any) -> Method:
    """GT-DSGDm: ``y <- M y + g_t - g_{t-1};  x <- M x - lr mom(y)``, heavy ball, mu = `outer_momentum`.

    y follows the mean gradient of all learners. On drifts, ``d = x - base`` of the local steps in the place of
    -lr g, which is folded into y and m:

        y <- M y + d_t - d_{t-1};  m <- mu m + y;  x <- M base + m

    The same numbers at a constant lr with plain SGD and H = 1. The learner's own work enters through y alone.
    Two vectors go to a partner, base and y of the round before; both are known when a round begins, so an
    overlap changes nothing. A round without a partner has M = I.

    The tracking rests on ``sum y = sum d`` over all learners. A joiner starts with y = d = 0 (`own_state`),
    which keeps the sums equal, and takes m of a donor. A learner that leaves takes its ``y - d`` along: the
    others keep that error in the sum for good, a known weakness of gradient tracking.

    Args:
        **overrides: fields of `farflung.protocol.policy.Policy`.

    Raises:
        ValueError: an unknown field, one that has no effect, or a value that is refused.

    >>> gt_dsgdm().num_vectors
    2
    """
    policy = gossip_policy("gt_dsgdm", DEFAULTS, overrides)
    refuse_unused(policy, "outer_lr", "momentum_on")
    return gossip_method(
        policy,
        contribute=offer,
        adopt=track(policy.outer_momentum),
        init=at_rest,
        num_vectors=2,
        own_state=("y", "d"),
    )


def at_rest(num_elements: int) -> State:
    """``y = d = m = 0``, each fp32 ``[N]``."""
    return {name: torch.zeros(num_elements) for name in ("y", "d", "m")}


def offer(local: Local) -> Contribution:
    """``[base; y]``, fp32 ``[2 N]``."""
    return Contribution(payload=torch.cat([local.base, local.state["y"]]), pending=local.state)


def track(mu: float) -> Callable[[Local, Tensor, bool], Local]:
    """The step, from a correction ``[2 N]``."""

    def adopt(local: Local, correction: Tensor, included: bool) -> Local:
        c_base, c_y = correction.chunk(2)
        d = local.x - local.base
        y = local.state["y"] - c_y + d - local.state["d"]
        m = mu * local.state["m"] + y
        return settled(local, local.base - c_base + m, y=y, d=d, m=m)

    return adopt
