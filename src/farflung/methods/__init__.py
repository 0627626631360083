"""Training methods by name: one recipe per file."""

from collections.abc import Callable
from typing import Any

import msgspec

from farflung.errors import did_you_mean
from farflung.methods.base import Method
from farflung.methods.decoupled import decoupled
from farflung.methods.diloco import diloco
from farflung.methods.streaming import streaming
from farflung.protocol.policy import Policy

METHODS: dict[str, Callable[..., Method]] = {
    "decoupled": decoupled,
    "diloco": diloco,
    "streaming": streaming,
}
"""Name in a recipe -> recipe."""

__all__ = ["METHODS", "Method", "decoupled", "diloco", "from_policy", "make_method", "streaming"]


def make_method(name: str, **options: Any) -> Method:
    """Build a method by name.

    Args:
        name: a key of `METHODS`.
        **options: fields of `farflung.protocol.policy.Policy` that differ from the method's defaults.

    Raises:
        ValueError: an unknown name or option, or a value that is refused.

    >>> make_method("diloco", sync_every_steps=50).policy.sync_every_steps
    50
    """
    if name not in METHODS:
        raise ValueError(f"method = {name!r} is unknown{did_you_mean(name, METHODS)}")
    return METHODS[name](**options)


def from_policy(policy: Policy) -> Method:
    """Build the method that a policy read from a tape, a checkpoint or a peer describes.

    Raises:
        ValueError: the policy names something that does not exist here.

    >>> from_policy(diloco().policy).policy == diloco().policy
    True
    """
    options = msgspec.to_builtins(policy)
    return make_method(options.pop("method"), **options)
