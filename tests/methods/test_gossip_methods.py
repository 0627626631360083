"""Gossip methods against the printed rules, written naively in float64 with explicit mixing matrices.

Legend: W workers, N parameters. A stack of all workers is ``[W, N]``; M is a round's mixing matrix ``[W, W]``,
doubly stochastic, at alpha = 1; L = I - M its Laplacian; ``I - alpha L`` mixes.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farflung.methods import (
    Method,
    ad_psgd,
    d_adamw,
    decentlam,
    diloco,
    dsgd,
    gasloc,
    gt_dsgdm,
    ld_sgd,
    make_method,
    noloco,
    qg_dsgdm,
)
from farflung.methods.base import Local
from farflung.methods.qg_dsgdm import NU

W, N, ROUNDS, LR = 6, 5, 15, 0.1
NAMES = ["ad_psgd", "d_adamw", "decentlam", "dsgd", "gasloc", "gt_dsgdm", "ld_sgd", "noloco", "qg_dsgdm"]
PLAIN = ["ad_psgd", "d_adamw", "dsgd", "ld_sgd"]
EYE = torch.eye(W, dtype=torch.float64)


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- a small world: every worker has a quadratic of its own, and rounds have mixing matrices ---------------

TARGET_WN, CURVE_WN, START_WN = rand(W, N, seed=1) * 2, rand(W, N, seed=2).abs() / 2 + 0.5, rand(W, N, seed=3)


def grad(x: Tensor, worker: int | slice) -> Tensor:
    return CURVE_WN[worker] * (x - TARGET_WN[worker])


def descend(x: Tensor, num_steps: int, worker: int | slice = slice(None)) -> Tensor:
    for _ in range(num_steps):
        x = x - LR * grad(x, worker)
    return x


def pair_matrix(pairs: list[tuple[int, int]], num: int = W) -> Tensor:
    """Exact averaging of pairs; who is in none keeps its own."""
    M = torch.eye(num, dtype=torch.float64)
    for i, j in pairs:
        M[i, i] = M[j, j] = M[i, j] = M[j, i] = 0.5
    return M


def random_pairs(round: int, num: int = W) -> Tensor:
    order = torch.randperm(num, generator=torch.Generator().manual_seed(round)).tolist()
    return pair_matrix(list(zip(order[::2], order[1::2], strict=False)), num)


def ring(round: int, num: int = W) -> Tensor:
    eye = torch.eye(num, dtype=torch.float64)
    return (eye + eye.roll(1, 0) + eye.roll(-1, 0)) / 3


def complete(round: int) -> Tensor:
    return torch.full((W, W), 1 / W, dtype=torch.float64)


def missing(round: int) -> Tensor:
    """Random pairs of which one never meets, and now and then none does."""
    order = torch.randperm(W, generator=torch.Generator().manual_seed(round)).tolist()
    return pair_matrix([] if round % 4 == 3 else list(zip(order[2::2], order[3::2], strict=True)))


GRAPHS = {"pairs": random_pairs, "ring": ring, "complete": complete, "missing": missing}
Graph = Callable[[int], Tensor]
graphs = pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
steps = pytest.mark.parametrize("num_steps", [1, 3])
momenta = pytest.mark.parametrize("momentum_on", ["local", "mixed"])


class Engine:
    """What the engine does in a round, in float64 and without the rounding of a codec.

    `num_steps`: of each worker's round. `overlap`: how many of them are taken after the offer.
    """

    def __init__(self, method: Method, x_WN: Tensor, num_steps: list[int], *, overlap: int = 0) -> None:
        self.method, self.num_steps, self.overlap = method, num_steps, overlap
        self.locals = [Local(x=x, base=x, state=method.init(x.numel())) for x in x_WN.clone()]
        self.drift_WN = torch.zeros_like(x_WN)

    @property
    def x_WN(self) -> Tensor:
        return torch.stack([me.x for me in self.locals])

    def train(self, steps_of: Callable[[int], int]) -> None:
        for w, me in enumerate(self.locals):
            self.locals[w] = replace(me, x=descend(me.x, steps_of(self.num_steps[w]), w))

    def round(self, M: Tensor) -> None:
        self.train(lambda H: max(0, H - self.overlap))
        offered = [self.method.contribute(me).payload for me in self.locals]
        self.train(lambda H: min(H, self.overlap))
        self.drift_WN = torch.stack([me.x - me.base for me in self.locals])
        for i, me in enumerate(self.locals):
            partners = [j for j in range(len(M)) if j != i and M[i, j]]
            correction = torch.zeros_like(offered[i])
            for j in partners:
                correction += self.method.policy.mixing * M[i, j] * (offered[i] - offered[j])
            self.locals[i] = self.method.adopt(me, correction, bool(partners))


def play(
    method: Method, graph: Graph, num_steps: int = 1, *, rounds: int = ROUNDS, overlap: int = 0
) -> Tensor:
    """Points of all workers after every round, ``[round, W, N]``."""
    engine = Engine(method, START_WN, [num_steps] * W, overlap=overlap)
    points = []
    for round in range(rounds):
        engine.round(graph(round))
        points.append(engine.x_WN)
    return torch.stack(points)


def history(step: Callable[[Tensor, Tensor], Tensor], graph: Graph, alpha: float = 1.0) -> Tensor:
    """The points of a printed rule ``x' = step(x, mixing matrix)``."""
    x_WN, points = START_WN, []
    for round in range(ROUNDS):
        x_WN = step(x_WN, EYE - alpha * (EYE - graph(round)))
        points.append(x_WN)
    return torch.stack(points)


def assert_same(actual: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def spread(x_WN: Tensor) -> float:
    """Consensus distance."""
    return float((x_WN - x_WN.mean(0)).square().sum(1).mean())


# ---- every method against its printed rule -----------------------------------------------------------------


@graphs
@steps
@momenta
@pytest.mark.parametrize("overlap", [0, 1])
def test_gasloc_is_the_printed_rule(graph: Graph, num_steps: int, momentum_on: str, overlap: int) -> None:
    eta, gamma, alpha = 0.7, 0.6, 0.5
    method = gasloc(momentum_on=momentum_on, outer_lr=eta, outer_momentum=gamma, mixing=alpha)
    y_old = z_old = START_WN

    def rule(x: Tensor, M: Tensor) -> Tensor:
        nonlocal y_old, z_old
        y = x + eta * (descend(x, num_steps) - x)
        offered = x + eta * (descend(x, num_steps - overlap) - x)
        z = y - (EYE - M) @ offered  # the step alpha is in M
        y_step, z_step = y - y_old, z - z_old
        y_old, z_old = y, z
        return z + gamma * (y_step if momentum_on == "local" else z_step)

    expected = history(rule, graph, alpha)
    assert_same(play(method, graph, num_steps, overlap=overlap), expected, atol=1e-13)


@graphs
@steps
def test_noloco_is_the_printed_rule(graph: Graph, num_steps: int) -> None:
    b, mu, m = 0.7, 0.5, torch.zeros_like(START_WN)

    def rule(p_old: Tensor, M: Tensor) -> Tensor:
        nonlocal m
        p = descend(p_old, num_steps)
        m = mu * m + b * M @ (p - p_old) + b * (M @ p_old - p_old)
        return p_old + m

    assert_same(play(noloco(), graph, num_steps), history(rule, graph))


@graphs
@steps
@pytest.mark.parametrize("name", ["dsgd", "d_adamw", "ld_sgd"])
def test_averaging_is_the_printed_rule(graph: Graph, num_steps: int, name: str) -> None:
    expected = history(lambda x, M: M @ descend(x, num_steps), graph)
    assert_same(play(make_method(name), graph, num_steps), expected)


@graphs
def test_ad_psgd_adds_a_gradient_of_the_unmixed_point_to_the_average(graph: Graph) -> None:
    expected = history(lambda x, M: M @ x - LR * grad(x, slice(None)), graph)
    assert_same(play(ad_psgd(), graph, overlap=ad_psgd().policy.overlap_steps), expected)


@graphs
@steps
def test_qg_dsgdm_is_the_printed_rule(graph: Graph, num_steps: int) -> None:
    b, mh = 0.9, torch.zeros_like(START_WN)

    def rule(x: Tensor, M: Tensor) -> Tensor:
        nonlocal mh
        g = (x - descend(x, num_steps)) / LR
        new = M @ (x - LR * (b * mh + g))
        mh = (1 - NU) * mh + NU * (x - new) / LR
        return new

    assert_same(play(qg_dsgdm(), graph, num_steps), history(rule, graph))


@graphs
@steps
def test_decentlam_is_the_printed_rule(graph: Graph, num_steps: int) -> None:
    mu, m = 0.5, torch.zeros_like(START_WN)

    def rule(x: Tensor, M: Tensor) -> Tensor:
        nonlocal m
        g = (x - descend(x, num_steps)) / LR
        m = mu * m + (x - M @ (x - LR * g)) / LR
        return x - LR * m

    assert_same(play(decentlam(), graph, num_steps), history(rule, graph))


@graphs
@steps
@pytest.mark.parametrize("overlap", [0, 1])
def test_gt_dsgdm_is_the_printed_rule_whatever_the_overlap(
    graph: Graph, num_steps: int, overlap: int
) -> None:
    mu = 0.9
    y = g_old = m = torch.zeros_like(START_WN)

    def rule(x: Tensor, M: Tensor) -> Tensor:
        nonlocal y, g_old, m
        g = (x - descend(x, num_steps)) / LR
        y, g_old = M @ y + g - g_old, g
        m = mu * m + y
        return M @ x - LR * m

    assert_same(play(gt_dsgdm(), graph, num_steps, overlap=overlap), history(rule, graph))


# ---- GASLoC: the mean, and the limits ----------------------------------------------------------------------


@st.composite
def mixings(draw: st.DrawFn) -> Graph:
    """Any symmetric matrices with rows that sum to one, another one each round."""
    seed, density = draw(st.integers(0, 10**6)), draw(st.floats(0.0, 1.0))

    def graph(round: int) -> Tensor:
        gen = torch.Generator().manual_seed(seed + round)
        weight = torch.rand(W, W, generator=gen, dtype=torch.float64)
        weight = weight * (torch.rand(W, W, generator=gen, dtype=torch.float64) < density)
        weight = (weight.triu(1) + weight.triu(1).T) / W
        return weight + torch.diag(1 - weight.sum(1))

    return graph


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    graph=mixings(),
    momentum_on=st.sampled_from(["local", "mixed"]),
    eta=st.floats(0.1, 1.0),
    gamma=st.floats(0.05, 0.9),
    alpha=st.floats(0.0, 0.3),
    num_steps=st.lists(st.integers(1, 4), min_size=W, max_size=W),
    overlap=st.integers(0, 3),
)
def test_the_mean_moves_like_pytorchs_nesterov_on_any_graph_with_any_timing(
    graph: Graph, momentum_on: str, eta: float, gamma: float, alpha: float, num_steps: list[int], overlap: int
) -> None:
    method = gasloc(momentum_on=momentum_on, outer_lr=eta, outer_momentum=gamma, mixing=alpha)
    engine = Engine(method, START_WN, num_steps, overlap=overlap)
    mean = torch.nn.Parameter(START_WN.mean(0))
    sgd = torch.optim.SGD([mean], lr=eta, momentum=gamma, nesterov=True)
    for round in range(10):
        engine.round(graph(round))
        mean.grad = -engine.drift_WN.mean(0)
        sgd.step()
        if momentum_on == "local":  # the corrections that the next round takes back sum to zero
            assert_same(torch.stack([me.state["c"] for me in engine.locals]).sum(0), torch.zeros_like(mean))
        assert_same(engine.x_WN.mean(0), mean.detach())


def diloco_points(worker: slice, num_steps: int) -> Tensor:
    """DiLoCo of the workers in a slice, from the mean of their starts, ``[round, N]``."""
    outer = diloco(outer_lr=0.7, outer_momentum=0.9).outer
    theta, points = START_WN[worker].mean(0), []
    state = outer.init(theta)
    for _ in range(ROUNDS):
        live_WN = descend(theta, num_steps, worker)
        theta, state = outer.update((theta - live_WN).mean(0), theta, state)
        points.append(theta)
    return torch.stack(points)


@steps
def test_on_the_complete_graph_mixed_is_diloco(num_steps: int) -> None:
    method = gasloc(momentum_on="mixed", outer_lr=0.7, outer_momentum=0.9, mixing=1.0)
    engine = Engine(method, START_WN.mean(0).repeat(W, 1), [num_steps] * W)
    for round, expected in enumerate(diloco_points(slice(None), num_steps)):
        engine.round(complete(round))
        assert_same(engine.x_WN, expected.repeat(W, 1))


@steps
def test_on_the_complete_graph_local_is_diloco_in_the_mean(
    num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "CURVE_WN", CURVE_WN[:1].repeat(W, 1))  # mean drift = drift of the mean
    method = gasloc(momentum_on="local", outer_lr=0.7, outer_momentum=0.9, mixing=1.0)
    engine = Engine(method, START_WN.mean(0).repeat(W, 1), [num_steps] * W)
    for round, expected in enumerate(diloco_points(slice(None), num_steps)):
        engine.round(complete(round))
        assert_same(engine.x_WN.mean(0), expected)
        assert spread(engine.x_WN) > 1e-5


@momenta
def test_one_learner_alone_is_diloco_with_one_worker(momentum_on: str) -> None:
    method = gasloc(momentum_on=momentum_on, outer_lr=0.7, outer_momentum=0.9)
    engine = Engine(method, START_WN[:1], [3])
    for expected in diloco_points(slice(0, 1), 3):
        engine.round(torch.eye(1, dtype=torch.float64))
        assert_same(engine.x_WN[0], expected)


@momenta
def test_without_mixing_the_runs_are_independent(momentum_on: str) -> None:
    alone = play(gasloc(momentum_on=momentum_on), lambda round: EYE, 3)
    together = play(gasloc(momentum_on=momentum_on, mixing=0.0), random_pairs, 3)
    assert torch.equal(together, alone)
    assert not torch.equal(play(gasloc(momentum_on=momentum_on), random_pairs, 3), alone)


@graphs
@steps
@momenta
def test_without_momentum_gasloc_is_local_sgd_and_averaging(
    graph: Graph, num_steps: int, momentum_on: str
) -> None:
    plain = gasloc(momentum_on=momentum_on, outer_lr=1.0, outer_momentum=0.0, mixing=1.0)
    same = [ld_sgd()] + ([dsgd(), d_adamw()] if num_steps == 1 else [])
    for other in same:
        assert_same(play(plain, graph, num_steps), play(other, graph, num_steps), atol=5e-15)


@momenta
def test_a_round_without_a_partner_takes_the_outer_step_alone(momentum_on: str) -> None:
    method = gasloc(momentum_on=momentum_on)
    eta, gamma = method.policy.outer_lr, method.policy.outer_momentum
    engine = Engine(method, START_WN, [3] * W)
    for round in range(4):
        engine.round(random_pairs(round))
    theta, state = engine.x_WN, [me.state for me in engine.locals]
    engine.round(EYE)
    v = gamma * torch.stack([s["v"] for s in state]) + eta * engine.drift_WN
    if momentum_on == "local":
        c_old = torch.stack([s["c"] for s in state])
        assert c_old.abs().max() > 0.01
        v -= c_old
        assert not any(me.state["c"].any() for me in engine.locals)
    assert_same(engine.x_WN, theta + eta * engine.drift_WN + gamma * v)


@momenta
def test_a_joiner_with_a_donors_state_leaves_the_mean_of_corrections_at_zero(momentum_on: str) -> None:
    """From when it joins, the mean of all moves like Nesterov from the mean of all points and momenta."""
    method = gasloc(momentum_on=momentum_on)
    eta, gamma = method.policy.outer_lr, method.policy.outer_momentum
    engine = Engine(method, START_WN[: W - 1], [2] * W)
    for round in range(5):
        engine.round(random_pairs(round, W - 1))
    donor = engine.locals[0]
    fresh = {name: method.init(N)[name] for name in method.own_state}
    engine.locals.append(replace(donor, state=donor.state | fresh))
    v, theta = torch.stack([me.state["v"] for me in engine.locals]).mean(0), engine.x_WN.mean(0)
    for round in range(5):
        engine.round(random_pairs(round))
        step = eta * engine.drift_WN.mean(0)
        v = gamma * v + step
        theta = theta + step + gamma * v
        assert_same(engine.x_WN.mean(0), theta)


# ---- stability: no training, only the disagreement ---------------------------------------------------------


def quiet(method: Method, graph: Graph, num: int, rounds: int) -> list[float]:
    """Consensus distance after every round without local steps."""
    engine = Engine(method, rand(num, N, seed=4), [0] * num)
    distances = [spread(engine.x_WN)]
    for round in range(rounds):
        engine.round(graph(round))
        distances.append(spread(engine.x_WN))
    return distances


@pytest.mark.parametrize(("gamma", "rate"), [(0.0, 0.949), (0.6, 0.781), (0.9, 0.949)])
def test_momentum_speeds_up_gossip_on_a_ring_of_sixteen(gamma: float, rate: float) -> None:
    method = gasloc(momentum_on="local", outer_momentum=gamma, mixing=1.0)
    far = quiet(method, lambda round: ring(round, 16), 16, 100)
    assert (far[100] / far[50]) ** (1 / 100) == pytest.approx(rate, abs=0.008)


STAY = {
    "gasloc": gasloc(),
    "gasloc, local": gasloc(momentum_on="local", outer_momentum=0.5, mixing=0.75),
    "gasloc, local, small alpha": gasloc(momentum_on="local", outer_momentum=0.9, mixing=0.35),
    "noloco": noloco(),
    "decentlam": decentlam(),
    "qg_dsgdm": qg_dsgdm(),
    "gt_dsgdm": gt_dsgdm(),
}
PART = {
    "gasloc, local": gasloc(momentum_on="local", outer_momentum=0.9, mixing=1.0),
    "noloco": noloco(outer_momentum=0.9),
    "decentlam": decentlam(outer_momentum=0.9),
}


@pytest.mark.parametrize("method", STAY.values(), ids=STAY)
def test_on_random_pairs_these_come_together(method: Method) -> None:
    far = quiet(method, lambda round: random_pairs(round, 8), 8, 300)
    assert far[-1] < 1e-2 * far[0]


@pytest.mark.parametrize("method", PART.values(), ids=PART)
def test_on_random_pairs_too_much_momentum_drives_them_apart(method: Method) -> None:
    far = quiet(method, lambda round: random_pairs(round, 8), 8, 300)
    assert far[-1] > 1e2 * far[0]


# ---- the others: relations, and what their sums keep -------------------------------------------------------


@graphs
@pytest.mark.parametrize("mu", [0.0, 0.5, 0.7])
def test_decentlam_is_noloco_at_rate_one(graph: Graph, mu: float) -> None:
    same = noloco(outer_lr=1.0, outer_momentum=mu, sync_every_steps=1)
    expected = play(same, graph)
    assert_same(play(decentlam(outer_momentum=mu), graph), expected, atol=5e-15)


def test_trackers_sum_to_the_drifts_also_after_a_join() -> None:
    method = gt_dsgdm()
    engine = Engine(method, START_WN[: W - 1], [2] * W)
    for round in range(2 * ROUNDS):
        if round == ROUNDS:
            donor = engine.locals[0]
            assert (donor.state["y"] - donor.state["d"]).abs().max() > 1e-3
            fresh = {name: method.init(N)[name] for name in method.own_state}
            engine.locals.append(replace(donor, state=donor.state | fresh))
        engine.round(random_pairs(round, len(engine.locals)))
        tracked = torch.stack([me.state["y"] for me in engine.locals]).sum(0)
        assert_same(tracked, engine.drift_WN.sum(0))


@pytest.mark.parametrize("name", PLAIN)
def test_averaging_keeps_the_mean_of_what_was_trained(name: str) -> None:
    engine = Engine(make_method(name), START_WN, [2] * W, overlap=1)
    for round in range(ROUNDS):
        before = engine.x_WN.mean(0)
        engine.round(missing(round))
        assert_same(engine.x_WN.mean(0), before + engine.drift_WN.mean(0))


# ---- settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_fields_without_effect_and_values_out_of_range_are_refused(name: str) -> None:
    unused = {"outer_lr": 0.25, "outer_momentum": 0.25, "momentum_on": "mixed"}
    if name == "gasloc":
        unused = {}
    elif name == "noloco":
        unused = {"momentum_on": "mixed"}
    elif name not in PLAIN:
        del unused["outer_momentum"]
    for field, value in unused.items():
        with pytest.raises(ValueError, match=f"{field} has no effect with method = '{name}'"):
            make_method(name, **{field: value})
    for field, value in (("outer_lr", 0.0), ("outer_momentum", 1.0)):
        with pytest.raises(ValueError, match="outer"):
            make_method(name, **{field: value})
    with pytest.raises(ValueError, match="nonsense"):
        make_method(name, matching="nonsense")


def test_the_published_settings_of_the_family() -> None:
    policies = {name: make_method(name).policy for name in NAMES}
    assert all(
        (p.topology, p.matching, p.num_fragments) == ("gossip", "random", 1) for p in policies.values()
    )
    one_step = {name for name, p in policies.items() if p.sync_every_steps == 1}
    assert one_step == {"ad_psgd", "d_adamw", "decentlam", "dsgd", "gt_dsgdm", "qg_dsgdm"}
    assert {name for name, p in policies.items() if p.overlap_steps} == {"ad_psgd"}
    p = policies["noloco"]
    assert (p.sync_every_steps, p.outer_lr, p.outer_momentum, p.mixing) == (50, 0.7, 0.5, 1.0)
    p = policies["gasloc"]
    assert (p.sync_every_steps, p.outer_lr, p.outer_momentum, p.mixing) == (24, 0.7, 0.7, 0.6)
    assert p.momentum_on == "mixed"
    assert (NU, policies["qg_dsgdm"].outer_momentum, policies["gt_dsgdm"].outer_momentum) == (0.1, 0.9, 0.9)
