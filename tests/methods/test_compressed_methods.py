"""Compressed methods against the printed rules, written naively in float64.

Legend: W workers, N parameters. A stack of all workers is ``[W, N]``. `T` is the orthonormal DCT or the identity.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from farflung.core.codecs import get_codec
from farflung.core.outer import Nesterov
from farflung.methods import (
    Method,
    dct_momentum,
    dct_momentum_shared,
    demo,
    diloco,
    make_method,
    muloco,
    random_rows,
    sparseloco,
)
from farflung.methods.base import Local
from farflung.methods.dct_momentum import from_contributors

W, N, ROUNDS, STEPS, LR = 4, 24, 12, 3, 0.1
HUB = ["dct_momentum_shared", "demo", "muloco", "random_rows", "sparseloco"]
NAMES = [*HUB, "dct_momentum"]
ROUNDING = 1e-12


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TARGET_WN, CURVE_WN, START_N = rand(W, N, seed=1) * 2, rand(W, N, seed=2).abs() / 2 + 0.5, rand(N, seed=3)


def descend(x: Tensor, worker: int) -> Tensor:
    """Some local steps on a quadratic of the worker's own, in the precision of x."""
    curve, target = CURVE_WN[worker].to(x.dtype), TARGET_WN[worker].to(x.dtype)
    for _ in range(STEPS):
        x = x - LR * curve * (x - target)
    return x


def dct_matrix() -> Tensor:
    n = torch.arange(N, dtype=torch.float64)
    basis = torch.cos(math.pi / N * (n[None] + 0.5) * n[:, None]) * math.sqrt(2 / N)
    basis[0] /= math.sqrt(2)
    return basis


IDENTITY, DCT = torch.eye(N, dtype=torch.float64), dct_matrix()


def top(coefficients: Tensor, k: int) -> Tensor:
    kept = torch.zeros_like(coefficients)
    index = coefficients.abs().topk(k).indices
    kept[index] = coefficients[index]
    return kept


@dataclass(frozen=True)
class Exact:
    """The k largest coefficients of one transform, in float64: what a codec does without its rounding."""

    T: Tensor
    k: int = N
    name: str = "exact"

    def size_bytes(self, num_elements: int) -> int:
        return num_elements * 8

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return top(self.T @ x, self.k).view(torch.uint8)

    def decode(self, payload: Tensor, num_elements: int, out: Tensor | None = None) -> Tensor:
        return self.T.T @ payload.view(torch.float64)


def assert_same(actual: Tensor, expected: Tensor, atol: float = ROUNDING) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


# ---- the moves of the engine with a hub --------------------------------------------------------------------


class Hub:
    """One model, W learners, and how many of a learner's contributions were merged."""

    def __init__(self, method: Method, num: int = W, start: Tensor = START_N) -> None:
        self.method, self.theta = method, start
        self.outer_state = method.outer.init(start)
        self.locals = [Local(x=start, base=start, state=method.init(N)) for _ in range(num)]
        self.deltas: list[Tensor] = []  # of all learners in the last round
        self.sent: list[Tensor] = []

    def m(self, worker: int) -> Tensor:
        return self.locals[worker].state["m"]

    def round(self, refused: tuple[int, ...] = (), data: Callable[[int], int] = lambda w: w) -> None:
        method = self.method
        self.locals = [replace(me, x=descend(me.x, data(w))) for w, me in enumerate(self.locals)]
        self.deltas = [me.base - me.x for me in self.locals]
        self.sent, pending = [], []
        for me in self.locals:
            contribution = method.contribute(me)
            self.sent.append(method.codec.decode(method.codec.encode(contribution.payload), N))
            assert method.sent is not None
            pending.append(method.sent(contribution, self.sent[-1]))
        merged = [w for w in range(len(self.locals)) if w not in refused]
        mean = torch.stack([self.sent[w] for w in merged]).mean(0)
        self.theta, self.outer_state = method.outer.update(mean, self.theta, self.outer_state)
        for w, me in enumerate(self.locals):
            state = method.settle(me.state, pending[w], w in merged)
            self.locals[w] = method.adopt(replace(me, state=state), self.theta, w in merged)


REFUSED = {3: (1,), 6: (0, 2), 7: (0,)}
"""Round -> whose contributions came too late."""


def play(method: Method, rounds: int = ROUNDS) -> Tensor:
    """Theta after every round, ``[round, N]``."""
    hub, points = Hub(method), []
    for round in range(rounds):
        hub.round(REFUSED.get(round, ()))
        points.append(hub.theta)
    return torch.stack(points)


def history(step: Callable[[Tensor, Tensor], Tensor], beta: float, T: Tensor, k: int) -> Tensor:
    """Theta of the printed rule ``theta' = step(theta, mean q)`` with ``q = T^-1 top(T m)``."""
    theta, m, points = START_N, [torch.zeros(N, dtype=torch.float64)] * W, []
    for round in range(ROUNDS):
        m_new = [beta * m[w] + theta - descend(theta, w) for w in range(W)]
        q = [T.T @ top(T @ m_new[w], k) for w in range(W)]
        merged = [w for w in range(W) if w not in REFUSED.get(round, ())]
        for w in merged:
            m[w] = m_new[w] - q[w]
        theta = step(theta, sum(q[w] for w in merged) / len(merged))
        points.append(theta)
    return torch.stack(points)


# ---- hub methods against their printed rules ---------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("k", [3, N])
def test_sparseloco_is_the_printed_rule(beta: float, k: int) -> None:
    method = replace(sparseloco(buffer_decay=beta), codec=Exact(IDENTITY, k))
    assert_same(play(method), history(lambda theta, q: theta - 0.4 * q, beta, IDENTITY, k))


@pytest.mark.parametrize("beta", [0.95, 1.0])
@pytest.mark.parametrize("k", [3, N])
def test_dct_momentum_shared_is_the_printed_rule(beta: float, k: int) -> None:
    method = replace(dct_momentum_shared(buffer_decay=beta), codec=Exact(DCT, k))
    eta, mu, b = 0.5, 0.8, torch.zeros(N, dtype=torch.float64)

    def step(theta: Tensor, q: Tensor) -> Tensor:
        nonlocal b
        b = mu * b + q
        return theta - eta * (q + mu * b)

    assert_same(play(method), history(step, beta, DCT, k))


@pytest.mark.parametrize("k", [3, N])
def test_demo_is_the_printed_rule(k: int) -> None:
    method = replace(demo(outer_lr=0.05), codec=Exact(DCT, k))
    printed = history(lambda theta, q: theta - 0.05 * torch.sign(q), 0.999, DCT, k)
    assert_same(play(method), printed)
    assert demo().policy.sync_every_steps == 1


def test_muloco_is_the_printed_rule() -> None:
    method, b = replace(muloco(), codec=Exact(IDENTITY, 3)), torch.zeros(N, dtype=torch.float64)

    def step(theta: Tensor, q: Tensor) -> Tensor:
        nonlocal b
        b = 0.9 * b + q
        return theta - 0.7 * (q + 0.9 * b)

    assert_same(play(method), history(step, 1.0, IDENTITY, 3))


@pytest.mark.parametrize("beta", [0.95, 1.0])
def test_random_rows_is_sparseloco_with_what_a_seed_draws(beta: float) -> None:
    method = random_rows(buffer_decay=beta, codec="random2-fp32-chunk8-seed5")
    hub = Hub(replace(method, codec=method.codec.at(0)), start=START_N.float())
    theta, m, sent_in = START_N.float(), [torch.zeros(N)] * W, torch.zeros(N)
    for round in range(4):
        codec = method.codec.at(round)
        hub.method = replace(method, codec=codec)
        hub.round()
        m = [beta * m[w] + theta - descend(theta, w) for w in range(W)]
        chosen = codec.decode(codec.encode(torch.ones(N)), N)
        sent_in += chosen
        theta = theta - 0.4 * sum(chosen * m[w] for w in range(W)) / W
        m = [(1 - chosen) * m[w] for w in range(W)]
        assert_same(hub.theta, theta, atol=1e-5)
    assert torch.equal(sent_in, torch.ones(N))  # 2 of 8, four times: each once


@pytest.mark.parametrize("method", [
    dct_momentum_shared(outer_lr=0.7, outer_momentum=0.9),
    dct_momentum_shared(outer_lr=0.7, outer_momentum=0.9, buffer_decay=0.5),
    muloco(),
    sparseloco(outer="nesterov", outer_lr=0.7, outer_momentum=0.9),
])  # fmt: skip
def test_with_every_coefficient_sent_identical_workers_are_diloco_with_nesterov(method: Method) -> None:
    hub = Hub(replace(method, codec=Exact(DCT)))
    outer = diloco().outer
    assert outer == Nesterov(lr=0.7, momentum=0.9)
    theta, state = START_N, outer.init(START_N)
    for _ in range(ROUNDS):
        hub.round(data=lambda w: 0)
        theta, state = outer.update(theta - descend(theta, 0), theta, state)
        assert_same(hub.theta, theta)


@pytest.mark.parametrize("name", HUB)
def test_error_feedback_telescopes_on_the_decoded_payload(name: str) -> None:
    """``sum q + m = sum Delta`` over what was merged, with the codec's own rounding, for beta = 1."""
    codec = {"random_rows": "random8-bf16-chunk16"}.get(name, "dct-top4-2bit-u16-chunk16")
    method = make_method(name, buffer_decay=1.0, codec=codec)
    hub = Hub(method, start=START_N.float())
    total_WN, sent_WN = torch.zeros(W, N), torch.zeros(W, N)
    for round in range(40):
        hub.method = replace(method, codec=method.codec.at(round))
        refused = REFUSED.get(round, ())
        hub.round(refused)
        for w in (w for w in range(W) if w not in refused):
            total_WN[w] += hub.deltas[w]
            sent_WN[w] += hub.sent[w]
            assert_same(sent_WN[w] + hub.m(w), total_WN[w], atol=1e-4)
    assert not torch.allclose(sent_WN, total_WN, atol=1e-2)


@pytest.mark.parametrize("name", HUB)
def test_a_refused_contribution_leaves_the_buffer_without_its_work(name: str) -> None:
    hub = Hub(replace(make_method(name), codec=Exact(IDENTITY, 3)))
    hub.round()
    before = [hub.m(w) for w in range(W)]
    assert all(m.any() for m in before)
    hub.round(refused=(2,))
    assert torch.equal(hub.m(2), before[2])
    assert not torch.equal(hub.m(1), before[1])


@pytest.mark.parametrize("name", HUB)
def test_learners_agree_and_a_joiner_begins_with_nothing_unsent(name: str) -> None:
    hub = Hub(replace(make_method(name), codec=Exact(IDENTITY, 3)))
    for round in range(ROUNDS):
        hub.round(REFUSED.get(round, ()))
        assert all(torch.equal(me.x, hub.theta) for me in hub.locals)
    assert not hub.method.init(N)["m"].any()


# ---- the authors' rule, without a hub ----------------------------------------------------------------------


class Peers:
    """W learners of which all who came mix with all others who came, and no point is shared."""

    def __init__(self, method: Method, num: int = W, start: Tensor = START_N) -> None:
        self.method = method
        self.locals = [Local(x=start, base=start, state=method.init(N)) for _ in range(num)]
        self.deltas: list[Tensor] = []

    def m(self) -> Tensor:
        return torch.stack([me.state["m"] for me in self.locals])

    def round(self, away: tuple[int, ...] = (), data: Callable[[int], int] = lambda w: w) -> None:
        codec, num = self.method.codec, len(self.locals)
        self.locals = [replace(me, x=descend(me.x, data(w))) for w, me in enumerate(self.locals)]
        self.deltas = [me.base - me.x for me in self.locals]
        payloads = [codec.encode(self.method.contribute(me).payload) for me in self.locals]
        y = [codec.decode(payload, N) for payload in payloads]
        for i, me in enumerate(self.locals):
            others = [j for j in range(num) if j != i and not {i, j} & set(away)]
            correction = sum(
                (self.method.policy.mixing / num * (y[i] - y[j]) for j in others), torch.zeros_like(y[i])
            )
            if self.method.correction is not None and others:
                correction = self.method.correction(codec, [payloads[i], *(payloads[j] for j in others)], N)
            self.locals[i] = self.method.adopt(me, correction, bool(others))


AWAY: dict[int, tuple[int, ...]] = {2: (3,), 5: (0, 1, 2, 3), 8: (1,)}


@pytest.mark.parametrize("beta", [0.5, 0.95])
@pytest.mark.parametrize("k", [3, N])
def test_dct_momentum_is_the_printed_rule(beta: float, k: int) -> None:
    peers = Peers(replace(dct_momentum(buffer_decay=beta), codec=Exact(DCT, k)))
    theta, m = [START_N] * W, [torch.zeros(N, dtype=torch.float64)] * W
    for round in range(ROUNDS):
        away = AWAY.get(round, ())
        peers.round(away)
        g = [theta[w] - descend(theta[w], w) for w in range(W)]  # and back to its own previous point
        m = [beta * m[w] + g[w] for w in range(W)]
        C = [top(DCT @ m[w], k) for w in range(W)]
        m = [m[w] - DCT.T @ C[w] for w in range(W)]  # what is sent leaves the momentum
        for w in range(W):
            heard = [
                C[w] if w in away or j in away else C[j] for j in range(W)
            ]  # the own one where nobody came
            m[w] = m[w] + DCT.T @ (sum(heard) / W)  # the shared part is put back
            theta[w] = theta[w] - 0.7 * (g[w] + beta * m[w])
        assert_same(torch.stack([me.x for me in peers.locals]), torch.stack(theta))
        assert_same(peers.m(), torch.stack(m))
    assert not torch.allclose(theta[0], theta[1])


@pytest.mark.parametrize("k", [3, N])
def test_the_put_back_loses_and_makes_no_momentum(k: int) -> None:
    peers = Peers(replace(dct_momentum(), codec=Exact(DCT, k)))
    for round in range(ROUNDS):
        before = peers.m().sum(0)
        peers.round(AWAY.get(round, ()))
        assert_same(peers.m().sum(0), 0.95 * before + torch.stack(peers.deltas).sum(0))


def test_the_put_back_loses_no_momentum_by_rounding_of_values_either() -> None:
    peers = Peers(dct_momentum(codec="dct-top3-2bit-u16-chunk16"), start=START_N.float())
    for _ in range(ROUNDS):
        before = peers.m().sum(0)
        peers.round()
        assert_same(peers.m().sum(0), 0.95 * before + torch.stack(peers.deltas).sum(0), atol=1e-5)


def test_dct_momentum_of_identical_workers_is_diloco_with_nesterov() -> None:
    """With any k, as what is put back is what was sent; and with one worker alone."""
    for k, num in ((N, W), (3, W), (3, 1)):
        peers = Peers(replace(dct_momentum(buffer_decay=0.9), codec=Exact(DCT, k)), num)
        outer = diloco().outer
        theta, state = START_N, outer.init(START_N)
        for _ in range(ROUNDS):
            peers.round(data=lambda w: 0)
            theta, state = outer.update(theta - descend(theta, 0), theta, state)
            for me in peers.locals:
                assert_same(me.x, theta)


def test_contributors_take_the_mean_over_those_who_sent_a_coefficient() -> None:
    codec = get_codec("top3-fp32-u16-chunk8")
    y = [rand(N, seed=10 + w).float() for w in range(W)]
    payloads = [codec.encode(one) for one in y]
    q_WN = torch.stack([codec.decode(payload, N) for payload in payloads])
    Q = q_WN.sum(0) / (q_WN != 0).sum(0).clamp(min=1)
    assert_same(from_contributors(codec, payloads, N), q_WN[0] - Q, atol=1e-6)
    assert float(Q.norm()) > 1.5 * float(q_WN.mean(0).norm())


def test_contributors_make_momentum_where_few_send_and_the_world_does_not() -> None:
    """One learner alone with a coefficient: all W get it whole, or W-ths of it."""
    grown = {}
    for reduce in ("world", "contributors"):
        peers = Peers(dct_momentum(reduce=reduce, codec="top3-fp32-u16-chunk8"), start=START_N.float())
        peers.round()
        grown[reduce] = float((peers.m().sum(0) - torch.stack(peers.deltas).sum(0)).norm())
    assert grown["world"] < 1e-5 < 0.5 < grown["contributors"]


def test_settings_of_dct_momentum_without_effect_are_refused() -> None:
    p = dct_momentum().policy
    assert (p.topology, p.matching, p.mixing, p.sync_every_steps, p.outer_lr, p.buffer_decay, p.reduce) == (
        "gossip", "complete", 1.0, 128, 0.7, 0.95, "world",
    )  # fmt: skip
    assert dct_momentum().own_state == ("m",)
    for changes, message in (
        ({"buffer_decay": 1.0}, "below 1"),
        ({"reduce": None}, "reduce = None"),
        ({"reduce": "contributors", "codec": "bf16"}, "has no effect with codec = 'bf16'"),
        ({"reduce": "contributors", "mixing": 0.5}, "mixing = 0.5 has no effect"),
        ({"outer_momentum": 0.5}, "outer_momentum has no effect"),
    ):
        with pytest.raises(ValueError, match=message):
            dct_momentum(**changes)
    with pytest.raises(ValueError, match="reduce has no effect with method = 'sparseloco'"):
        sparseloco(reduce="world")


# ---- settings ----------------------------------------------------------------------------------------------


def test_the_published_settings() -> None:
    p = sparseloco().policy
    assert (p.sync_every_steps, p.buffer_decay, p.outer, p.outer_lr, p.codec) == (
        30, 0.95, "sgd", 0.4, "top64-2bit-12bit",
    )  # fmt: skip
    p = dct_momentum_shared().policy
    assert (p.outer, p.outer_lr, p.outer_momentum, p.buffer_decay) == ("nesterov", 0.5, 0.8, 1.0)
    for name in HUB:
        p = make_method(name).policy
        assert (p.topology, p.pace, p.num_fragments, p.overlap_steps, p.quorum, p.adoption) == (
            "hub", "lockstep", 1, 0, "all", "overwrite",
        )  # fmt: skip


def test_sparselocos_payload_is_146_times_smaller_than_fp32() -> None:
    exact = get_codec("top64-2bitx262144-12bit")
    num = 4096 * 4096
    assert 4 * num / (exact.size_bytes(num) - 8) == pytest.approx(146.2857, abs=1e-4)
    assert 4 * num / sparseloco().codec.size_bytes(num) == pytest.approx(143.7, abs=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_a_decay_out_of_its_range_is_refused(name: str) -> None:
    for beta in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="buffer_decay"):
            make_method(name, buffer_decay=beta)
    with pytest.raises(ValueError, match="buffer_decay = None"):
        make_method(name, buffer_decay=None)


@pytest.mark.parametrize("name", ["diloco", "decoupled", "gasloc", "ld_sgd"])
def test_a_decay_of_a_buffer_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"buffer_decay has no effect with method = '{name}'"):
        make_method(name, buffer_decay=0.5)


def test_the_digest_of_other_methods_is_what_it_was_and_decay_changes_ones_own() -> None:
    assert diloco().policy.digest() == "1ca26131"
    assert sparseloco().policy.digest() != sparseloco(buffer_decay=0.9).policy.digest()
