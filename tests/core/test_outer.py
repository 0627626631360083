"""Outer optimizers against torch.optim and their formulas."""

import pytest
import torch

from farflung.core.outer import OUTERS, Momentum, Nesterov, Outer, Sgd, make_outer

EVERY = [Sgd(lr=0.7), Momentum(lr=0.7, momentum=0.9), Nesterov(lr=0.7, momentum=0.9)]


def _deltas(num: int, size: int = 1003) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=rng) for _ in range(num)]


def _torch_twin(outer: Outer, param: torch.Tensor, foreach: bool) -> torch.optim.SGD:
    return torch.optim.SGD(
        [param],
        lr=outer.lr,
        momentum=getattr(outer, "momentum", 0.0),
        nesterov=isinstance(outer, Nesterov),
        foreach=foreach,
    )


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("outer", EVERY, ids=lambda o: type(o).__name__)
def test_every_outer_equals_torch_sgd_bit_for_bit_over_many_steps(outer, foreach):
    theta, *deltas = _deltas(31)
    param = theta.clone().requires_grad_()
    twin = _torch_twin(outer, param, foreach)
    state = outer.init(theta)
    for delta in deltas:
        theta, state = outer.update(delta, theta, state)
        param.grad = delta.clone()
        twin.step()
        assert torch.equal(theta, param.detach())


@pytest.mark.parametrize("outer", EVERY, ids=lambda o: type(o).__name__)
def test_update_leaves_its_inputs_alone_and_into_buffers_gives_the_same_bits(outer):
    theta, delta, b = _deltas(3)
    state = {name: b.clone() for name in outer.init(theta)}
    before = [t.clone() for t in (theta, delta, b)]
    new_theta, new_state = outer.update(delta, theta, state)
    assert all(torch.equal(x, y) for x, y in zip((theta, delta), before[:2], strict=True))
    assert all(torch.equal(value, before[2]) for value in state.values())

    out_theta = torch.full_like(theta, torch.nan)
    outer.update_into(delta, theta, state, out_theta, state)  # state in place
    assert torch.equal(out_theta, new_theta)
    assert all(torch.equal(state[name], value) for name, value in new_state.items())


def test_nesterov_follows_its_formula_in_float64():
    theta, *deltas = _deltas(11)
    outer = Nesterov(lr=0.4, momentum=0.9)
    state, exact, b = outer.init(theta), theta.double(), torch.zeros(len(theta), dtype=torch.float64)
    for delta in deltas:
        theta, state = outer.update(delta, theta, state)
        b = 0.9 * b + delta.double()
        exact = exact - 0.4 * (delta.double() + 0.9 * b)
    torch.testing.assert_close(theta.double(), exact, rtol=1e-5, atol=1e-5)


def test_constant_delta_drives_momentum_to_its_geometric_sum():
    outer = Nesterov(lr=1.0, momentum=0.5)
    theta, state = torch.zeros(1), {"momentum": torch.zeros(1)}
    for _ in range(40):
        theta, state = outer.update(torch.ones(1), theta, state)
    assert state["momentum"].item() == pytest.approx(1 / (1 - 0.5))


def test_nesterov_without_momentum_is_sgd():
    theta, delta = _deltas(2)
    nesterov, sgd = Nesterov(lr=0.7, momentum=0.0), Sgd(lr=0.7)
    assert torch.equal(
        nesterov.update(delta, theta, nesterov.init(theta))[0], sgd.update(delta, theta, {})[0]
    )


@pytest.mark.parametrize("name", OUTERS)
def test_make_outer_builds_every_name(name):
    assert make_outer(name, 0.5).lr == 0.5


@pytest.mark.parametrize("lr", [0.0, -1.0, float("inf"), float("nan")])
def test_bad_learning_rates_are_refused(lr):
    with pytest.raises(ValueError, match="outer lr"):
        make_outer("nesterov", lr, 0.9)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_bad_momenta_are_refused(momentum):
    with pytest.raises(ValueError, match="momentum"):
        make_outer("nesterov", 0.7, momentum)


def test_momentum_without_effect_and_unknown_names_are_refused():
    with pytest.raises(ValueError, match="no effect"):
        make_outer("sgd", 0.7, 0.9)
    with pytest.raises(ValueError, match="did you mean 'nesterov'"):
        make_outer("nestrov", 0.7, 0.9)
