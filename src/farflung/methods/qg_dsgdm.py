"""QG-DSGDm (arXiv 2102.04761): local steps with a momentum that follows the mixed parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farflung.methods.base import Contribution, Local, Method, State
from farflung.methods.gossip import gossip_method, gossip_policy, refuse_unused, settled

DEFAULTS = {"matching": "random", "sync_every_steps": 1, "outer_momentum": 0.9}

NU = 0.1  # share of the newest displacement in the buffer; of the authors' code


def qg_dsgdm(**overrides: Any) -> Method:
    """QG-DSGDm, as in the authors' code, b = `outer_momentum`, nu = 0.1:

        m = b mh + g;  x' = M (x - lr m);  d = (x - x') / lr;  mh <- (1 - nu) mh + nu d

    On drifts, u = -lr mh in units of parameters and x the live value after the local steps:

        y = x + b u;  x' = M y;  u <- (1 - nu) u + nu (x' - base)

    The same numbers at a constant lr with plain SGD and H = 1; under a schedule the printed rule rescales its
    buffer with lr and this one does not. With another inner optimizer, or H above 1, the drift takes the place of
    -lr g. y is offered; a round without a partner has M = I.

    Args:
        **overrides: fields of `farflung.protocol.policy.Policy`.

    Raises:
        ValueError: an unknown field, one that has no effect, or a value that is refused.

    >>> qg_dsgdm().policy.outer_momentum
    0.9
    """
    policy = gossip_policy("qg_dsgdm", DEFAULTS, overrides)
    refuse_unused(policy, "outer_lr", "momentum_on")
    b = policy.outer_momentum
    return gossip_method(policy, contribute=offer(b), adopt=follow(b), init=at_rest)


def at_rest(num_elements: int) -> State:
    """``u = 0``, fp32 ``[N]``."""
    return {"u": torch.zeros(num_elements)}


def offer(b: float) -> Callable[[Local], Contribution]:
    """``y = x + b u``."""

    def contribute(local: Local) -> Contribution:
        return Contribution(payload=local.x + b * local.state["u"], pending=local.state)

    return contribute


def follow(b: float) -> Callable[[Local, Tensor, bool], Local]:
    """``x' = x + b u - c;  u <- (1 - nu) u + nu (x' - base)``."""

    def adopt(local: Local, correction: Tensor, included: bool) -> Local:
        u = local.state["u"]
        x = local.x + b * u - correction
        return settled(local, x, u=(1 - NU) * u + NU * (x - local.base))

    return adopt
