"""Streaming DiLoCo (arXiv 2501.18512): fragments in turn, overlap with compute, 4-bit outer gradients."""

from typing import Any

from farflung.methods.base import Method, hub_method, make_policy

DEFAULTS = {
    "pace": "lockstep",
    "num_fragments": 4,
    "sync_every_steps": 30,
    "overlap_steps": 5,
    "fragment_plan": "strided",
    "quorum": "all",
    "grace_gamma": 0.0,
    "throttle": False,
    "weighting": "equal",
    "merge": "avg",
    "merge_embedding": "avg",
    "anchor": "present",
    "adoption": "mix",
    "mix_alpha": 0.5,
    "codec": "int4",
    "outer": "nesterov",
    "outer_lr": 0.4,
    "outer_momentum": 0.9,
}


def streaming(**overrides: Any) -> Method:
    """Streaming DiLoCo: fragment p at ``step mod H == floor(p H / P)``, adopted tau steps later.

    ``theta <- alpha theta + (1 - alpha) Theta``, alpha = 0.5; strided fragments of whole layers; E3M0 outer
    gradients, accumulated in fp32; outer lr 0.4, momentum 0.9. The paper uses H = 30 or 100 and shows tau up
    to 10 at little loss; here H = 30 and tau = 5. Its fragments hold three layers; P = 4 suits small models,
    larger ones want ``num_fragments`` = layers / 3. ``adoption="overwrite"`` also wants ``mix_alpha=0``.

    Args:
        **overrides: fields of `farflung.protocol.policy.Policy`.

    Raises:
        ValueError: an unknown field, or a value that is refused.

    >>> streaming(num_fragments=8).policy.mix_alpha
    0.5
    """
    return hub_method(make_policy("streaming", DEFAULTS, overrides))
