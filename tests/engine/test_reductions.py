"""Closed forms: what training together must be equal to in special cases."""

import pytest
import torch
from engine_helpers import World, inner_step, mlp, vector

from farflung.methods import Method, decoupled, diloco

H, ROUNDS = 4, 3
AVERAGING = {"outer": "sgd", "outer_lr": 1.0, "outer_momentum": 0.0}


def run(method: Method, num: int, *, same_data: bool = False, rounds: int = ROUNDS) -> World:
    world = World([mlp() for _ in range(num)], method).birth()
    for _ in range(rounds):
        for m in range(num):
            for _ in range(H):
                world.train(m, data=0 if same_data else None)
        for fragment in world.fragments:
            world.sync(fragment)
    return world


def test_one_learner_with_averaging_is_plain_training_with_one_subtraction_bit_for_bit() -> None:
    world = run(diloco(sync_every_steps=H, **AVERAGING), 1)
    model = mlp()
    with torch.no_grad():
        theta = {n: p.clone() for n, p in model.named_parameters()}
    for r in range(ROUNDS):
        for h in range(H):
            inner_step(model, 0, r * H + h)
        with torch.no_grad():
            for name, p in model.named_parameters():
                delta = theta[name] - p
                theta[name] = theta[name] - delta
                p.copy_(theta[name])
    assert torch.equal(vector(world.models[0]), vector(model))


def test_one_learner_with_averaging_is_plain_training_within_rounding() -> None:
    world = run(diloco(sync_every_steps=H, **AVERAGING), 1)
    model = mlp()
    for step in range(ROUNDS * H):
        inner_step(model, 0, step)
    torch.testing.assert_close(vector(world.models[0]), vector(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize("num", [2, 3, 4, 5, 8])
def test_identical_learners_equal_one(num: int) -> None:
    one = vector(run(diloco(sync_every_steps=H), 1, same_data=True).models[0])
    many = run(diloco(sync_every_steps=H), num, same_data=True)
    for model in many.models:
        if num in (2, 4):  # weights and partial sums round to nothing
            assert torch.equal(vector(model), one)
        torch.testing.assert_close(vector(model), one, rtol=0, atol=1e-6)


@pytest.mark.parametrize("num", [2, 3, 8])
def test_identical_learners_equal_one_under_rda(num: int) -> None:
    options = {"pace": "lockstep", "num_fragments": 2, "sync_every_steps": H}
    one = vector(run(decoupled(**options), 1, same_data=True).models[0])
    many = vector(run(decoupled(**options), num, same_data=True).models[0])
    torch.testing.assert_close(many, one, rtol=0, atol=1e-6)


def test_decoupled_with_all_learners_and_no_overlap_is_diloco_bit_for_bit() -> None:
    same = decoupled(
        pace="lockstep",
        num_fragments=1,
        sync_every_steps=H,
        overlap_steps=0,
        quorum=3,
        merge="avg",
        weighting="equal",
    )
    ours, theirs = run(same, 3), run(diloco(sync_every_steps=H), 3)
    assert ours.hub.digest(0, ROUNDS) == theirs.hub.digest(0, ROUNDS)
    for one, other in zip(ours.models, theirs.models, strict=True):
        assert torch.equal(vector(one), vector(other))


def test_diloco_is_torch_nesterov_on_the_mean_outer_gradient() -> None:
    world = run(diloco(sync_every_steps=H), 2)
    models = [mlp(), mlp()]
    theta = torch.nn.Parameter(vector(mlp()))
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    for r in range(ROUNDS):
        for m, model in enumerate(models):
            for h in range(H):
                inner_step(model, m, r * H + h)
        theta.grad = sum(theta.detach() - vector(model) for model in models) / 2
        outer.step()
        for model in models:
            torch.nn.utils.vector_to_parameters(theta.detach().clone(), model.parameters())
    torch.testing.assert_close(vector(world.models[1]), theta.detach(), rtol=0, atol=1e-6)


def test_after_a_loss_the_remaining_identical_learners_still_equal_one() -> None:
    one = run(diloco(sync_every_steps=H), 1, same_data=True)
    world = run(diloco(sync_every_steps=H), 3, same_data=True, rounds=2)
    world.round += 1
    for m in (0, 2):
        for _ in range(H):
            world.train(m, data=0)
        world.take(m, 0)
    world.merge(0, {0: 0.5, 2: 0.5})
    world.adopt(0, 0, world.round)
    torch.testing.assert_close(vector(world.models[0]), vector(one.models[0]), rtol=0, atol=1e-6)


def test_a_trained_model_gives_a_delta_and_leaves_the_base_alone() -> None:
    world = World([mlp()], diloco()).birth()
    before = world.islands[0].base(0).clone()
    world.train(0)
    world.take(0, 0)
    delta = world.up[0](0).view(torch.float32)
    assert torch.equal(world.islands[0].base(0), before)
    assert delta.abs().min() > 0
    x = torch.cat([p.detach().reshape(-1) for _, p in sorted(world.models[0].named_parameters())])
    assert torch.equal(delta, before - x)
