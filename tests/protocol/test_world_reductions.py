"""Closed forms of whole runs: machines, hub and islands together (P14)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.core.vectors import gather, live_tensors
from farflung.methods import Method, decoupled, diloco
from farflung.testing import World, quadratic_model
from farflung.testing.quadratic import lr_after, pull_

H, ROUNDS = 4, 3
AVERAGING = {"outer": "sgd", "outer_lr": 1.0, "outer_momentum": 0.0}
TARGETS = [0.0, 1.0, -2.0]


def trained(method: Method, num: int, targets: list[float] | None = None, **world: Any) -> World:
    """A run whose learners take H steps in each of the rounds, and a hand-in that merges the rest."""
    budget = num * 10 * (H * ROUNDS + 1)
    return World(method, [0.1] * num, budget, targets=targets or [0.5] * num, **world).run()


def digests(world: World) -> list[str]:
    assert world.finished == "finished", world.story()
    assert min(world.hub.versions) >= ROUNDS, world.story()
    return [world.hub.digest(p, v) for p, v in enumerate(world.hub.versions)]


def vector(world: World, fragment: int = 0) -> Tensor:
    return torch.frombuffer(
        bytearray(world.hub.value_bytes(fragment, world.hub.versions[fragment])), dtype=torch.float32
    )


@pytest.mark.parametrize("quorum", ["all", 3])
def test_decoupled_with_all_learners_and_no_overlap_is_diloco_bit_for_bit(quorum: int | str) -> None:
    same = decoupled(
        pace="lockstep",
        num_fragments=1,
        sync_every_steps=H,
        overlap_steps=0,
        quorum=quorum,
        merge="avg",
        weighting="equal",
    )
    ours, theirs = (trained(method, 3, TARGETS) for method in (same, diloco(sync_every_steps=H)))
    assert digests(ours) == digests(theirs), ours.story()


def test_equal_counts_weigh_the_same_by_tokens_as_equally() -> None:
    by_tokens = trained(diloco(sync_every_steps=H, weighting="tokens"), 3, TARGETS)
    assert digests(by_tokens) == digests(trained(diloco(sync_every_steps=H), 3, TARGETS))


@pytest.mark.parametrize("num", [1, 2, 4])
def test_identical_learners_equal_one_bit_for_bit(num: int) -> None:
    """Weights and partial sums of a power of two round to nothing."""
    assert digests(trained(diloco(sync_every_steps=H), num)) == digests(
        trained(diloco(sync_every_steps=H), 1)
    )


def test_three_identical_learners_equal_one_within_rounding() -> None:
    one, three = (vector(trained(diloco(sync_every_steps=H), num)) for num in (1, 3))
    torch.testing.assert_close(three, one, rtol=0, atol=1e-6)


def test_one_learner_with_averaging_is_plain_training_with_one_subtraction_bit_for_bit() -> None:
    world = trained(diloco(sync_every_steps=H, **AVERAGING), 1)
    model = quadratic_model()
    parameters = dict(model.named_parameters())
    rest = world.syncer.membership.members["learner-0"].steps_done - H * ROUNDS  # handed in at the end
    assert 0 < rest < H
    steps = 0
    with torch.no_grad():
        for length in [H] * ROUNDS + [rest]:
            theta = {name: p.clone() for name, p in parameters.items()}
            for _ in range(length):
                steps += 1
                for p in parameters.values():
                    pull_(p, 0.5, lr_after(steps))
            for name, p in parameters.items():
                p.copy_(theta[name] - (theta[name] - p))
    assert torch.equal(vector(world), gather(live_tensors(model), world.plan.fragments[0].pieces)), (
        world.story()
    )


def test_one_contributor_under_rda_is_its_own_input_bit_for_bit() -> None:
    rda, avg = (trained(diloco(sync_every_steps=H, merge=merge), 1) for merge in ("rda", "avg"))
    assert digests(rda) == digests(avg)


def test_arrival_order_changes_no_bit() -> None:
    """The same learners, but the first is the slowest: sums run in learner order."""
    method = diloco(sync_every_steps=H)
    budget = 3 * 10 * H * ROUNDS
    runs = [
        World(method, steps, budget, targets=TARGETS).run() for steps in ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1])
    ]
    both = [[w.hub.digest(0, v) for v in (2,) if v in w.hub.kept(0)] or digests(w) for w in runs]
    assert both[0] == both[1]
