"""DiLoCo (arXiv 2311.08105): all learners train H steps, then wait for all, and one outer step follows."""

from typing import Any

from farflung.methods.base import Method, hub_method, make_policy

DEFAULTS = {
    "pace": "lockstep",
    "num_fragments": 1,
    "sync_every_steps": 500,
    "overlap_steps": 0,
    "fragment_plan": "balanced",
    "quorum": "all",
    "grace_gamma": 0.0,
    "throttle": False,
    "weighting": "equal",
    "merge": "avg",
    "merge_embedding": "avg",
    "anchor": "present",
    "adoption": "overwrite",
    "codec": "fp32",
    "outer": "nesterov",
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
}


def diloco(**overrides: Any) -> Method:
    """DiLoCo: ``Delta = mean_m (Theta - theta_m)``, ``Theta <- Nesterov(Theta, Delta)``.

    The whole model is one fragment (P = 1), nothing overlaps (tau = 0) and every live learner is waited for.
    The paper's main setting is H = 500, outer lr 0.7, momentum 0.9 (H from 30 to 500 is in use); runs of a
    few hundred steps want a smaller ``sync_every_steps``. `anchor` changes nothing while nobody is stale.

    Args:
        **overrides: fields of `farflung.protocol.policy.Policy`.

    Raises:
        ValueError: an unknown field, or a value that is refused.

    >>> diloco(sync_every_steps=30).policy.outer_lr
    0.7
    """
    return hub_method(make_policy("diloco", DEFAULTS, overrides))
