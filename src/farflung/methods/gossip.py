"""What the gossip methods share: learners mix with partners of their own, and no hub holds the parameters.

In a round a learner takes its local steps, offers a vector y to its partners and gets theirs. The engine turns
what arrived into one vector, the *correction* ``c_i = alpha sum_j M_ij (y_i - y_j)``, each y as its receivers
decode it; so a method's mixed vector is ``y - c``, and the corrections of all learners sum to zero. A partner that
did not come adds nothing to it.

    contribute(local) -> payload, pending       y, offered ``overlap_steps`` steps before the end of the round
    adopt(local, correction, included)          at the end of the round; ``base`` is the point it began from

`Local.base` is the learner's own parameters at the start of the round, so ``x - base`` is its drift: new minus
old, the other way round than an outer gradient. A baseline that is defined on gradients is written on drifts,
``lr g = base - x`` for plain SGD, which makes it one rule for every inner optimizer.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from torch import Tensor

from farflung.core.codecs import Codec, get_codec
from farflung.core.mixing import MATCHINGS
from farflung.core.outer import Replace, make_outer
from farflung.methods.base import Contribution, Local, Method, State, check_name, make_policy, no_state
from farflung.protocol.policy import Policy

DEFAULTS: dict[str, Any] = {
    "topology": "gossip",
    "pace": "free",
    "num_fragments": 1,
    "sync_every_steps": 24,
    "overlap_steps": 0,
    "quorum": 1,
    "throttle": False,
    "weighting": "equal",
    "merge": "avg",
    "anchor": "base",
    "outer": "gossip",
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "final": "outer",
    "codec": "bf16",
}
"""What the family has in common. `quorum`, `weighting`, `merge` and `anchor` say how a hub makes the consensus
average, ``outer = "gossip"`` that it takes no outer step of its own."""


FIXED = (
    "pace", "quorum", "grace_gamma", "max_lead_steps", "throttle", "weighting", "merge", "merge_embedding",
    "anchor", "adoption", "mix_alpha", "outer", "final",
)  # fmt: skip
_POLICY_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Policy)}


def gossip_policy(name: str, defaults: dict[str, Any], overrides: dict[str, Any]) -> Policy:
    """A method's policy: the family's `DEFAULTS`, then the method's, then what the user set.

    Raises:
        ValueError: an unknown field, or a value that is refused.
    """
    policy = make_policy(name, {**DEFAULTS, **defaults}, overrides)
    check_name("topology", policy.topology, ("gossip",))
    check_name("matching", policy.matching, MATCHINGS)
    for field in FIXED:
        if getattr(policy, field) != {**_POLICY_DEFAULTS, **DEFAULTS}[field]:
            raise ValueError(f"{field} has no effect with method = {name!r}: there is no hub that merges")
    return policy


def gossip_method(
    policy: Policy,
    *,
    contribute: Callable[[Local], Contribution],
    adopt: Callable[[Local, Tensor, bool], Local],
    init: Callable[[int], State] = no_state,
    correction: Callable[[Codec, Sequence[Tensor], int], Tensor] | None = None,
    num_vectors: int = 1,
    own_state: tuple[str, ...] = (),
    dense: Method | None = None,
    unstable: Callable[[int], str | None] = lambda num_learners: None,
) -> Method:
    """A method of the family from its policy and its functions (see the module)."""
    return Method(
        policy=policy, codec=get_codec(policy.codec), outer=Replace(), contribute=contribute, adopt=adopt,
        init=init, correction=correction, num_vectors=num_vectors, own_state=own_state, dense=dense,
        unstable=unstable,
    )  # fmt: skip


def refuse_unused(policy: Policy, *fields: str) -> None:
    """Refuse an outer rate or momentum out of its range, and fields that a gossip method does not read.

    Raises:
        ValueError: names the field.
    """
    make_outer("nesterov", policy.outer_lr, policy.outer_momentum)
    untouched = gossip_policy(policy.method, {}, {})
    for field in fields:
        if getattr(policy, field) != getattr(untouched, field):
            raise ValueError(f"{field} has no effect with method = {policy.method!r}")


def offer_live(local: Local) -> Contribution:
    """Offer the live value."""
    return Contribution(payload=local.x, pending=local.state)


def settled(local: Local, x: Tensor, **state: Tensor) -> Local:
    """The end of a round: a new point to go on from, and the state that belongs to it."""
    return replace(local, x=x, base=x, state=state, snapshot=None)
