"""A baseline for every claim about selection: rows that a seed draws, so that no positions travel."""

from typing import Any

from farflung.methods.base import Method
from farflung.methods.compressed import compressed_method

DEFAULTS = {
    "codec": "rows64-bf16",
    "outer": "sgd",
    "outer_lr": 0.4,
    "outer_momentum": 0.0,
}


def random_rows(**overrides: Any) -> Method:
    """`sparseloco` with rows by chance in the place of the largest elements.

        m <- beta m + (Theta - theta);   q = rows_t(m);   m <- m - q;   Theta <- Theta - alpha mean q

    All learners send the same rows of round t: one of the 64 rows of 64 elements of each chunk, in bf16, without
    positions; 64 rounds send every row once. Their payloads sum like plain vectors, so an all-reduce could do it.

    Args:
        **overrides: fields of `farflung.protocol.policy.Policy`; the seed is part of the codec,
        ``rows64-bf16-seed7``.

    Raises:
        ValueError: an unknown field, or a value that is refused.

    >>> random_rows().codec.size_bytes(4096 * 4)  # against 65536
    520
    """
    return compressed_method("random_rows", DEFAULTS, overrides)
