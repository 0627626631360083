"""Training methods by name: one recipe per file."""

from collections.abc import Callable
from typing import Any

import msgspec

from farflung.errors import did_you_mean
from farflung.methods.ad_psgd import ad_psgd
from farflung.methods.base import Method
from farflung.methods.dct_momentum import dct_momentum
from farflung.methods.dct_momentum_shared import dct_momentum_shared
from farflung.methods.decentlam import decentlam
from farflung.methods.decoupled import decoupled
from farflung.methods.demo import demo
from farflung.methods.diloco import diloco
from farflung.methods.dsgd import d_adamw, dsgd
from farflung.methods.gasloc import gasloc
from farflung.methods.gt_dsgdm import gt_dsgdm
from farflung.methods.ld_sgd import ld_sgd
from farflung.methods.muloco import muloco
from farflung.methods.noloco import noloco
from farflung.methods.qg_dsgdm import qg_dsgdm
from farflung.methods.random_rows import random_rows
from farflung.methods.sparseloco import sparseloco
from farflung.methods.streaming import streaming
from farflung.protocol.policy import Policy

METHODS: dict[str, Callable[..., Method]] = {
    "ad_psgd": ad_psgd,
    "d_adamw": d_adamw,
    "dct_momentum": dct_momentum,
    "dct_momentum_shared": dct_momentum_shared,
    "decentlam": decentlam,
    "decoupled": decoupled,
    "demo": demo,
    "diloco": diloco,
    "dsgd": dsgd,
    "gasloc": gasloc,
    "gt_dsgdm": gt_dsgdm,
    "ld_sgd": ld_sgd,
    "muloco": muloco,
    "noloco": noloco,
    "qg_dsgdm": qg_dsgdm,
    "random_rows": random_rows,
    "sparseloco": sparseloco,
    "streaming": streaming,
}
"""Name in a recipe -> recipe."""

__all__ = [
    "METHODS",
    "Method",
    "ad_psgd",
    "d_adamw",
    "dct_momentum",
    "dct_momentum_shared",
    "decentlam",
    "decoupled",
    "demo",
    "diloco",
    "dsgd",
    "from_policy",
    "gasloc",
    "gt_dsgdm",
    "ld_sgd",
    "make_method",
    "muloco",
    "noloco",
    "qg_dsgdm",
    "random_rows",
    "sparseloco",
    "streaming",
]


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
