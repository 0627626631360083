"""Rare dense rounds: learners whose points drift apart become their average again, and every byte is foreseen."""

import pytest
import torch
from engine_helpers import mlp, vector
from test_peer_island import Gossip, weights

from farflung.engine.layout import value_layout
from farflung.engine.make import offer_sizes, slot_sizes
from farflung.methods import Method, dct_momentum, dsgd, sparseloco

W, ETA, BETA = 3, 0.5, 0.9


def method_of(every: int | None = 3, **changes) -> Method:
    plain = {
        "codec": "dct-top2-int8-u16-chunk64",
        "outer_lr": ETA,
        "buffer_decay": BETA,
        "sync_every_steps": 2,
    }
    return dct_momentum(dense_every_rounds=every, **{**plain, **changes})


def world_of(method: Method) -> Gossip:
    return Gossip([mlp(seed) for seed in range(W)], method)


def spread(world: Gossip) -> float:
    x_WN = world.x_WN
    return float((x_WN - x_WN.mean(0)).norm())


def together(world: Gossip) -> None:
    world.round(weights("complete", W, world.number, 1.0))


def test_points_are_one_after_a_dense_round_and_only_then() -> None:
    world = world_of(method_of())
    for number in range(6):
        together(world)
        assert (spread(world) < 1e-5) == (number in (2, 5)), (number, spread(world))


def test_without_dense_rounds_points_stay_apart() -> None:
    world = world_of(method_of(None))
    for _ in range(6):
        together(world)
        assert spread(world) > 1e-2


def test_a_dense_round_takes_everyones_step_alone_and_then_their_mean() -> None:
    world, alone = world_of(method_of(1)), world_of(method_of(None))
    together(world)
    alone.round(torch.zeros(W, W))
    mean = alone.x_WN.double().mean(0)
    torch.testing.assert_close(world.x_WN.double(), mean.expand(W, -1), rtol=0, atol=1e-6)
    for one, other in zip(world.islands, alone.islands, strict=True):
        assert torch.equal(one.save().tensors["0.state.m"], other.save().tensors["0.state.m"])


def test_a_dense_round_without_partners_is_a_step_alone() -> None:
    world, alone = world_of(method_of(1)), world_of(method_of(None))
    for one in (world, alone):
        one.round(torch.zeros(W, W))
    assert torch.equal(world.x_WN, alone.x_WN)


def test_vectors_of_dense_rounds_are_whole_and_their_size_is_known_before() -> None:
    method = method_of()
    world = world_of(method)
    usual, dense = offer_sizes(world.plan, method)
    assert dense == value_layout(world.plan.fragments[0]).size_bytes > usual
    sent = []
    for _ in range(4):
        reports = [world.train(i) for i in range(W)]
        sent.append({t.num_bytes for each in reports for report in each for t in report.taken})
        for i in range(W):
            world.mix(i, [])
        world.number += 1
    assert sent == [{usual}, {usual}, {dense}, {usual}]
    up, down = slot_sizes(world.plan, method)
    assert up(0) == down(1) == dense
    assert len(set(offer_sizes(world.plan, method_of(None)))) == 1


def test_overlap_leaves_the_drift_of_its_steps_only() -> None:
    apart = []
    for overlap in (0, 1, 2):
        world = world_of(method_of(3, overlap_steps=overlap))
        for _ in range(3):
            together(world)
        apart.append(spread(world))
    assert apart[0] < 1e-5 < apart[1] < apart[2]


@pytest.mark.parametrize(("every", "dense"), [(1, [0, 1, 2, 3]), (2, [1, 3]), (4, [3]), (None, [])])
def test_which_rounds_are_dense(every: int | None, dense: list[int]) -> None:
    policy = method_of(every).policy
    assert [round for round in range(4) if policy.is_dense(round)] == dense


def test_a_policy_without_dense_rounds_has_the_digest_that_it_always_had() -> None:
    assert dct_momentum().policy.digest() == "707c2d89"
    assert dct_momentum(dense_every_rounds=8).policy.digest() != dct_momentum().policy.digest()


@pytest.mark.parametrize("make", [sparseloco, dsgd])
def test_methods_whose_learners_agree_have_no_use_for_it(make) -> None:
    with pytest.raises(ValueError, match="dense_every_rounds has no effect with method"):
        make(dense_every_rounds=4)


def test_a_number_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="dense_every_rounds = 0: must be at least 1"):
        dct_momentum(dense_every_rounds=0)


def test_parameters_are_what_is_averaged() -> None:
    """Not a view of them, and not their change."""
    world = world_of(method_of(1, sync_every_steps=1))
    before = [vector(model).clone() for model in world.models]
    together(world)
    assert all(float((vector(m) - b).norm()) > 1e-3 for m, b in zip(world.models, before, strict=True))
