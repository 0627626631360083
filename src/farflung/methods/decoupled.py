"""Decoupled DiLoCo (arXiv 2604.21428): learners never wait; the syncer merges whatever arrives."""

from typing import Any

from farflung.methods.base import Method, hub_method, make_policy

DEFAULTS = {
    "pace": "free",
    "num_fragments": 24,
    "sync_every_steps": 24,
    "overlap_steps": 2,
    "fragment_plan": "balanced",
    "quorum": 1,
    "grace_gamma": 0.8,
    "throttle": True,
    "weighting": "tokens",
    "merge": "rda",
    "merge_embedding": "avg",
    "anchor": "present",
    "adoption": "overwrite",
    "codec": "fp32",
    "outer": "nesterov",
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
}


def decoupled(**overrides: Any) -> Method:
    """Decoupled DiLoCo, Algorithms 1 and 2: ``Delta_p = Merge({Theta_p - theta_mp}, w_mp)`` over who came.

    P = H = 24 balanced fragments, tau = 2, quorum K = 1 with a grace window, weights
    ``c_tokens^2 / c_steps``, RDA for all tensors but the embedding (plain average), adoption by overwriting.
    Not published, chosen here: outer lr 0.7 and momentum 0.9 (DiLoCo's), gamma 0.8, RDA per tensor.

    Args:
        **overrides: fields of `farflung.protocol.policy.Policy`.

    Raises:
        ValueError: an unknown field, or a value that is refused.

    >>> decoupled(num_fragments=8).policy.merge
    'rda'
    """
    return hub_method(make_policy("decoupled", DEFAULTS, overrides))
