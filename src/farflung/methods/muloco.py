"""MuLoCo (arXiv 2505.23725): DiLoCo with Muon inside, in 2 bits with error feedback."""

from typing import Any

from farflung.methods.base import Method
from farflung.methods.compressed import compressed_method

DEFAULTS = {
    "codec": "2bit",
    "buffer_decay": 1.0,
    "outer": "nesterov",
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
}
"""H = 30 and 2 bits are the paper's; the outer step is DiLoCo's, and beta plain error feedback."""


def muloco(**overrides: Any) -> Method:
    """MuLoCo: DiLoCo's rounds with what a codec of few bits cuts off carried to the next.

        m <- beta m + (Theta - theta);   q = decode(encode(m));   m <- m - q;   Theta <- Nesterov(Theta, mean q)

    Muon is the learners' inner optimizer, a choice of the task, ``text_muon`` for instance: its steps are easier
    to compress. With AdamW inside this is DiLoCo with error feedback. ``codec = "top64-2bit-12bit"`` and the
    like send a part of the elements.

    Args:
        **overrides: fields of `farflung.protocol.policy.Policy`; `buffer_decay` is beta.

    Raises:
        ValueError: an unknown field, or a value that is refused.

    >>> muloco().policy.codec
    '2bit'
    """
    return compressed_method("muloco", DEFAULTS, overrides)
