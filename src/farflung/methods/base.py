"""What a method is: policy data, and a few pure functions on flat fp32 fragment vectors with named state.

A learner and the hub exchange *payloads*. For one fragment of N elements:

    learner   contribute(local) -> payload, pending        at the snapshot
              sent(contribution, decoded) -> pending       after encoding, to keep what the codec cut off
              settle(state, pending, merged) -> state      when the fate of the payload is known
              adopt(local, result, included) -> local      when the next version arrives
    hub       the merge rule of each segment, and `outer`: merged payload -> next version

The same five places serve methods whose replicas agree and those whose replicas do not: DCT-decoupled
momentum (arXiv 2510.03371) keeps its own base and lets an `outer` publish the merged payload itself; GASLoC
(2606.11081) has a peer's vector as `result` and no hub. `tests/methods/test_method_shape.py` holds both.

Functions never write to their inputs. They may return the vectors of a `Local` or a result, but must not keep
them in a state: those belong to the engine, which reuses their memory. Legend: N elements of the fragment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from torch import Tensor

from farflung.core.codecs import Codec, get_codec
from farflung.core.fragments import PLANS
from farflung.core.outer import Outer, make_outer
from farflung.core.weighting import WEIGHTINGS
from farflung.errors import did_you_mean, field_error
from farflung.protocol.policy import BUFFER_FIELDS, Policy

State = dict[str, Tensor]
"""Method state of one fragment at one learner: name -> tensor. Saved with the learner."""

MERGES = ("avg", "rda")


@dataclass(frozen=True, kw_only=True)
class Local:
    """A learner's side of one fragment.

    Attributes:
        x: live value, fp32 ``[N]``.
        base: what this learner last installed, fp32 ``[N]``; its delta is taken against it.
        state: method state.
        snapshot: value at the last snapshot whose contribution is not adopted yet, fp32 ``[N]``; only for
            methods that keep it.
    """

    x: Tensor
    base: Tensor
    state: State
    snapshot: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What a learner sends, and the method state that holds once it was merged.

    Attributes:
        payload: fp32 ``[N]``, to be encoded by the method's codec.
        pending: the next method state if the payload is merged; dropped otherwise.
    """

    payload: Tensor
    pending: State


def no_state(num_elements: int) -> State:
    """Method state of a method that has none."""
    return {}


def outer_gradient(local: Local) -> Contribution:
    """``delta = base - x``, old minus new: stepping against it repeats the learner's work (DiLoCo).

    >>> import torch
    >>> outer_gradient(Local(x=torch.tensor([2.0]), base=torch.tensor([5.0]), state={})).payload
    tensor([3.])
    """
    return Contribution(payload=local.base - local.x, pending=local.state)


def commit_by_fate(state: State, pending: State, merged: bool) -> State:
    """The pending state if the contribution was merged, else the state from before it."""
    return pending if merged else state


def overwrite(local: Local, result: Tensor, included: bool) -> Local:
    """``x <- result``: later work is dropped (Decoupled DiLoCo, Algorithm 1, line 16, alpha = 0)."""
    return replace(local, x=result, base=result, snapshot=None)


def mix(alpha: float) -> Callable[[Local, Tensor, bool], Local]:
    """``x <- alpha x + (1 - alpha) result`` (Streaming DiLoCo, arXiv 2501.18512).

    The base becomes the result, so what the learner kept of its own is part of its next delta.

    Args:
        alpha: share of its own value that a learner keeps, in [0, 1).
    """

    def adopt(local: Local, result: Tensor, included: bool) -> Local:
        return replace(local, x=alpha * local.x + (1 - alpha) * result, base=result, snapshot=None)

    return adopt


def rebase(local: Local, result: Tensor, included: bool) -> Local:
    """``x <- result + (x - snapshot)`` if that contribution is included, else ``result + (x - base)``.

    Work that was merged is not added again, and none is lost. A snapshot that is still out moves into the new
    frame, ``snapshot <- result + (snapshot - base)``, so that a later result that includes it subtracts the
    same work from the same origin.

    Raises:
        ValueError: included, but no snapshot was kept.
    """
    if not included:
        moved = None if local.snapshot is None else result + (local.snapshot - local.base)
        return replace(local, x=result + (local.x - local.base), base=result, snapshot=moved)
    if local.snapshot is None:
        raise ValueError("rebase: the result includes a contribution whose snapshot was not kept")
    return replace(local, x=result + (local.x - local.snapshot), base=result, snapshot=None)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A recipe of training together: data for machines, functions for the engine (see the module).

    Attributes:
        policy: everything that is data; all that machines see.
        codec: packs a payload.
        downlink: packs a version's difference from the one before; None: whole values go down.
        outer: makes the next version of a fragment from the present one and the merged payload.
        adopt: puts a result into a learner.
        init: method state of a fragment of N elements.
        contribute: what to send.
        sent: told what others will decode (error feedback, put-back); None saves the decoding.
        settle: method state after the fate of a contribution.
        keeps_snapshot: keep the snapshot vector until the contribution is adopted: one more copy.
        correction: gossip: makes the correction of codec, payloads (the own first) and number of elements;
            None takes ``sum_j w_j (y_i - y_j)``.
        num_vectors: gossip: vectors of N elements in a payload, one behind the other.
        own_state: gossip: names of state that a joiner begins afresh instead of taking it from a donor.
        dense: gossip: what the method is in rounds that average whole parameters (`Policy.is_dense`).
        unstable: num_learners -> one line if learners would drift apart for ever, with the bound; else None.
    """

    policy: Policy
    codec: Codec
    outer: Outer
    adopt: Callable[[Local, Tensor, bool], Local]
    downlink: Codec | None = None
    init: Callable[[int], State] = no_state
    contribute: Callable[[Local], Contribution] = outer_gradient
    sent: Callable[[Contribution, Tensor], State] | None = None
    settle: Callable[[State, State, bool], State] = commit_by_fate
    keeps_snapshot: bool = False
    correction: Callable[[Codec, Sequence[Tensor], int], Tensor] | None = None
    num_vectors: int = 1
    own_state: tuple[str, ...] = ()
    dense: "Method | None" = None
    unstable: Callable[[int], str | None] = lambda num_learners: None

    def in_round(self, round: int) -> "Method":
        """The method of a round: this one, or `dense`."""
        return self.dense if self.dense is not None and self.policy.is_dense(round) else self


def make_policy(method: str, defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> Policy:
    """Build a method's policy: its defaults, then what the user set.

    Raises:
        ValueError: an unknown field (names the closest), a value of the wrong type, or a contradiction.

    >>> make_policy("decoupled", {"quorum": 1}, {"quorum": "all"}).quorum
    'all'
    """
    known = [name for name in Policy.__struct_fields__ if name != "method"]
    for name in overrides:
        if name not in known:
            raise ValueError(f"method {method!r} has no option {name!r}{did_you_mean(name, known)}")
    for name in BUFFER_FIELDS:
        if name not in defaults and overrides.get(name) is not None:
            raise ValueError(f"{name} has no effect with method = {method!r}")
    try:
        return msgspec.convert({**defaults, **overrides, "method": method}, Policy)
    except msgspec.ValidationError as error:
        raise ValueError(f"method {method!r}: {field_error(error, Policy)}") from error


def hub_method(policy: Policy) -> Method:
    """Send outer gradients to a hub and adopt as the policy says: most of the family is this.

    Raises:
        ValueError: the policy names a codec, outer optimizer, merge rule, weighting or plan that is unknown.
    """
    check_name("topology", policy.topology, ("hub",))
    check_name("weighting", policy.weighting, WEIGHTINGS)
    check_name("fragment_plan", policy.fragment_plan, PLANS)
    check_name("merge", policy.merge, MERGES)
    check_name("merge_embedding", policy.merge_embedding, MERGES)
    adoptions = {"overwrite": overwrite, "mix": mix(policy.mix_alpha), "rebase": rebase}
    return Method(
        policy=policy,
        codec=get_codec(policy.codec),
        downlink=None
        if policy.downlink_codec is None
        else get_codec(policy.downlink_codec, "downlink_codec"),
        outer=make_outer(policy.outer, policy.outer_lr, policy.outer_momentum),
        adopt=adoptions[policy.adoption],
        keeps_snapshot=policy.adoption == "rebase",
    )


def check_name(field: str, value: str, known: Any) -> None:
    """Raise ValueError unless a field of the policy names something that exists."""
    if value not in known:
        raise ValueError(f"{field} = {value!r} is unknown{did_you_mean(value, known)}")
