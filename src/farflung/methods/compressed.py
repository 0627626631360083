"""What the compressed hub methods share: a buffer at each learner, of which a sparse part travels in every round.

    m <- beta m + Delta        Delta = base - x, the learner's own work
    q  = decode(encode(m))     what the codec selects, as the hub decodes it
    m <- m - q                 if q is merged; otherwise both lines are undone, with the learner's work
    hub   Theta <- outer(Theta, mean q)

What was not sent, and what the codec rounded away, stays in m for later rounds: error feedback on the decoded
payload, so that with beta = 1 the sum telescopes, ``sum q + m = sum Delta``. All learners hold equal
parameters; only m is their own, and a joiner begins with m = 0, or with what it kept. It is one vector of the
fragment's size at each learner.

A payload is a step, not a model: ``anchor = "base"`` does not turn a late one into a pull to an old point, and
``final = "outer"`` ends a run with a step like all others. Judge a setting by rounds x density, how often an
element has travelled: below about 5 it has not been tried.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from farflung.core.codecs import drop_sent
from farflung.methods.base import Contribution, Local, Method, State, hub_method, make_policy
from farflung.methods.diloco import DEFAULTS as DILOCO

DEFAULTS: dict[str, Any] = {
    **DILOCO,
    "sync_every_steps": 30,
    "anchor": "base",
    "final": "outer",
    "buffer_decay": 0.95,
}
"""What the family has in common: DiLoCo's rounds, of all learners and of the whole model."""


def compressed_method(name: str, defaults: dict[str, Any], overrides: dict[str, Any]) -> Method:
    """A method of the family: `DEFAULTS`, then the method's, then what the user set.

    Raises:
        ValueError: an unknown field, or a value that is refused.
    """
    policy = make_policy(name, {**DEFAULTS, **defaults}, overrides)
    return replace(
        hub_method(policy),
        init=empty,
        contribute=accumulate(buffer_decay_of(policy.buffer_decay)),
        sent=keep_the_rest,
    )


def buffer_decay_of(beta: float | None) -> float:
    """A method with a buffer needs its decay.

    Raises:
        ValueError: it is absent.
    """
    if beta is None:
        raise ValueError("buffer_decay = None: must be from 0 to 1")
    return beta


def empty(num_elements: int) -> State:
    """``m = 0``, fp32 ``[N]``."""
    return {"m": torch.zeros(num_elements)}


def accumulate(beta: float) -> Callable[[Local], Contribution]:
    """``m <- beta m + Delta``: all of it is offered, the codec selects."""

    def contribute(local: Local) -> Contribution:
        m = grown(local, beta)
        return Contribution(payload=m, pending={"m": m})

    return contribute


def grown(local: Local, beta: float) -> Tensor:
    """``beta m + Delta``, in new memory."""
    return (local.base - local.x).add_(beta * local.state["m"])


def keep_the_rest(contribution: Contribution, decoded: Tensor) -> State:
    """``m <- m - q``."""
    return {"m": drop_sent(contribution.payload, decoded)}
