"""D-PSGD (arXiv 1705.09056) and D-AdamW: after every local step, average the parameters with partners."""

from typing import Any

from torch import Tensor

from farflung.methods.base import Local, Method
from farflung.methods.gossip import gossip_method, gossip_policy, offer_live, refuse_unused, settled

DEFAULTS = {"matching": "random", "sync_every_steps": 1}


def average(local: Local, correction: Tensor, included: bool) -> Local:
    """``x <- x - c``: the mixed value of what was offered, and the steps since then.

    >>> import torch
    >>> me = Local(x=torch.tensor([4.0]), base=torch.tensor([5.0]), state={})
    >>> average(me, torch.tensor([1.0]), True).x  # a partner offered 2: c = (4 - 2) / 2
    tensor([3.])
    """
    return settled(local, local.x - correction)


def averaging(name: str, defaults: dict[str, Any], overrides: dict[str, Any]) -> Method:
    """Offer the live value, go on from the mixed one; no outer step and no state."""
    policy = gossip_policy(name, defaults, overrides)
    refuse_unused(policy, "outer_lr", "outer_momentum", "momentum_on")
    return gossip_method(policy, contribute=offer_live, adopt=average)


def dsgd(**overrides: Any) -> Method:
    """D-PSGD, Algorithm 1: ``x <- M (x - lr u)``, M the mixing matrix of the round, u the inner direction.

    ``M = I - alpha L`` over whom the matching brings together; alpha (`mixing`) = 1, random pairs. The paper's
    ring is ``matching = "ring"``. Optimizer states stay local: the inner optimizer is the task's own, so DSGDm is
    this method over SGD with momentum. With ``sync_every_steps`` = H above 1 it is LD-SGD.

    Args:
        **overrides: fields of `farflung.protocol.policy.Policy`.

    Raises:
        ValueError: an unknown field, one that has no effect, or a value that is refused.

    >>> dsgd().policy.sync_every_steps
    1
    """
    return averaging("dsgd", DEFAULTS, overrides)


def d_adamw(**overrides: Any) -> Method:
    """D-AdamW: the rule of `dsgd` under the name that it has when the task's inner optimizer is AdamW.

    GASLoC compares itself with it at one step a round. First and second moments are not mixed.

    Args:
        **overrides: fields of `farflung.protocol.policy.Policy`.

    Raises:
        ValueError: an unknown field, one that has no effect, or a value that is refused.

    >>> d_adamw().policy.method
    'd_adamw'
    """
    return averaging("d_adamw", DEFAULTS, overrides)
