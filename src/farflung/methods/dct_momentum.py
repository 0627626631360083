"""DCT-decoupled momentum by the authors' rule (arXiv 2510.03371): only part of the momentum is shared."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from farflung.core.codecs import Codec, SparseCodec, contributor_mean, get_codec
from farflung.methods.base import Contribution, Local, Method
from farflung.methods.compressed import buffer_decay_of, empty, grown
from farflung.methods.gossip import gossip_method, gossip_policy, refuse_unused, settled
from farflung.protocol.policy import Policy

DEFAULTS = {
    "matching": "complete",
    "mixing": 1.0,
    "sync_every_steps": 128,
    "codec": "dct-top32-int8-12bit",
    "outer_lr": 0.7,  # eta
    "buffer_decay": 0.95,  # beta
    "reduce": "world",
    "dense_every_rounds": None,
}


def dct_momentum(**overrides: Any) -> Method:
    """The rule of arXiv 2510.03371, of W learners, each with a point theta_i and a momentum m_i of its own:

        g_i = theta_i - x_i                                  x_i: after H local steps from theta_i
        m_i <- beta m_i + g_i
        q_i = IDCT(top32(DCT(m_i)));  m_i <- m_i - q_i       what is sent leaves the momentum
        m_i <- m_i + Q,  Q = mean of all q                   the shared part is put back
        theta_i <- theta_i - eta (g_i + beta m_i)            Nesterov, from its own point and with its own g_i

    H = 128, beta .95, k = 32 of 4096, eta .7. A partner's payload is its q as decoded, and the correction of
    gossip is ``c_i = q_i - Q``, so the two lines in the middle are one: ``m_i <- m_i - c_i``. Nothing of a
    round is kept, one without partners is plain Nesterov, and as corrections sum to zero no momentum is lost
    or made.

    "High frequencies" is the paper's name; the largest coefficients of any frequency travel. As g_i and the
    rest of m_i stay local, points drift apart, each with its own data: look at the spread beside the
    consensus average.

    `dense_every_rounds` makes every so many rounds a dense one: each takes its step as if it had no partner, the
    points it leads to travel whole in fp32, and all become their mean, up to rounding and to the drift of
    `overlap_steps`. Momenta stay as they are. None, as in the paper: never.

    `reduce` says what Q is. "world": ``sum q / W``. "contributors": the mean over those who sent a
    coefficient, which is what the public code does; it makes momentum where few send, up to W times, and
    diverged with heterogeneous learners in toy runs. Decided here: of a partner that does not come nothing is
    known, so "world" takes the own q in its place. A joiner takes theta of a donor and begins with m = 0,
    or with the m that it kept: most of a donor's m is what that one has not sent. Under other matchings,
    "random" for instance, the mean is that of partners.

    Args:
        **overrides: fields of `farflung.protocol.policy.Policy`; `buffer_decay` is beta, below 1.

    Raises:
        ValueError: an unknown field, one that has no effect, or a value that is refused.

    >>> dct_momentum(reduce="contributors").policy.matching
    'complete'
    """
    policy = gossip_policy("dct_momentum", DEFAULTS, overrides)
    beta = buffer_decay_of(policy.buffer_decay)
    _check(policy, beta)
    dense = gossip_method(
        policy, contribute=offer_point(policy.outer_lr, beta), adopt=average(policy.outer_lr, beta), init=empty,
        own_state=("m",),
    )  # fmt: skip
    return gossip_method(
        policy,
        dense=None if policy.dense_every_rounds is None else replace(dense, codec=get_codec("fp32")),
        contribute=offer(beta),
        adopt=look_ahead(policy.outer_lr, beta),
        init=empty,
        correction=from_contributors if policy.reduce == "contributors" else None,
        own_state=("m",),
    )


def offer(beta: float) -> Callable[[Local], Contribution]:
    """``beta m + g``: the codec selects."""

    def contribute(local: Local) -> Contribution:
        return Contribution(payload=grown(local, beta), pending=local.state)

    return contribute


def look_ahead(eta: float, beta: float) -> Callable[[Local, Tensor, bool], Local]:
    """The step, ``m = beta m + g - c``, ``theta - eta (g + beta m)``; g is that of the whole round."""

    def adopt(local: Local, correction: Tensor, included: bool) -> Local:
        m = grown(local, beta) - correction
        return settled(local, local.base - eta * (local.base - local.x + beta * m), m=m)

    return adopt


def lonely(local: Local, eta: float, beta: float) -> tuple[Tensor, Tensor]:
    """Point and momentum after a round without partners."""
    m = grown(local, beta)
    return local.base - eta * (local.base - local.x + beta * m), m


def offer_point(eta: float, beta: float) -> Callable[[Local], Contribution]:
    """Dense rounds: ``y = theta - eta (g + beta m)``, whole."""

    def contribute(local: Local) -> Contribution:
        return Contribution(payload=lonely(local, eta, beta)[0], pending=local.state)

    return contribute


def average(eta: float, beta: float) -> Callable[[Local, Tensor, bool], Local]:
    """Dense rounds: ``theta <- y - c``, with one weight for all their mean; the momentum stays a learner's own."""

    def adopt(local: Local, correction: Tensor, included: bool) -> Local:
        point, m = lonely(local, eta, beta)
        return settled(local, point - correction, m=m)

    return adopt


def from_contributors(codec: Codec, payloads: Sequence[Tensor], num_elements: int) -> Tensor:
    """``q_i - Q``: Q is each coefficient's mean over the payloads that hold it; the own one comes first."""
    assert isinstance(codec, SparseCodec)
    parts = [codec.coefficients(payload, num_elements) for payload in payloads]
    shared = contributor_mean(parts, [1.0] * len(parts))
    return codec.decode(payloads[0], num_elements) - codec.restore(shared, num_elements)


def _check(policy: Policy, beta: float) -> None:
    refuse_unused(policy, "outer_momentum", "momentum_on")
    if beta == 1:
        raise ValueError(
            "buffer_decay = 1.0: must be below 1 with method = 'dct_momentum', whose momentum it is"
        )
    if policy.reduce is None:
        raise ValueError("reduce = None: must be 'world' or 'contributors'")
    if policy.reduce == "contributors" and policy.mixing != 1:
        raise ValueError(f"mixing = {policy.mixing} has no effect with reduce = 'contributors'")
    if policy.reduce == "contributors" and not isinstance(get_codec(policy.codec), SparseCodec):
        raise ValueError(
            f"reduce = 'contributors' has no effect with codec = {policy.codec!r}: all send everything"
        )
