"""Trouble with numbers, in whole runs."""

import pytest
import torch

from farflung.methods import Method, decoupled, diloco
from farflung.testing import World


def poisoned(method: Method) -> World:
    """From 2 s on, learner 1 trains on a batch that makes its parameters NaN, once."""
    world = World(method, [0.1, 0.1], 1500)

    def poison() -> None:
        with torch.no_grad():
            next(iter(world.islands[1].body.inner.model.parameters())).fill_(float("nan"))

    world.at(2.0, poison)
    return world.run(until_s=200.0)


@pytest.mark.parametrize(
    "method",
    [
        decoupled(num_fragments=2, sync_every_steps=4, adoption="rebase", lease_s=1.0),
        decoupled(num_fragments=2, sync_every_steps=4, lease_s=1.0),
        diloco(sync_every_steps=4, lease_s=1.0),
    ],
    ids=["rebase", "overwrite", "diloco"],
)
def test_a_learner_whose_parameters_break_never_reaches_the_model(method: Method) -> None:
    world = poisoned(method)
    assert world.finished == "finished", world.story()
    assert world.syncer.refused.get("non_finite", 0) > 0, world.story()
    assert all(tensor.isfinite().all() for tensor in world.hub.model_tensors().values())
    world.syncer.ledger.validate()
    assert world.syncer.ledger.in_flight == 0


def test_a_learner_that_stays_broken_is_reset_in_place_and_rejoins() -> None:
    world = poisoned(decoupled(num_fragments=2, sync_every_steps=4, adoption="rebase", lease_s=1.0))
    (note,) = world.tape.notes("start_over")
    assert note["reason"] == "the syncer asked for it"
    assert world.islands[1].generation == 1  # the same process
    assert world.syncer.membership.members["learner-1"].incarnation == 2
    assert world.syncer.admission.rejoins == 1, world.story()
    assert not world.tape.notes("alarm")


def test_a_merge_that_overflows_keeps_the_bits_of_the_version_before() -> None:
    """Two finite contributions whose mean is not: outer lr 1e38 times anything above 1."""
    world = World(
        diloco(sync_every_steps=4, outer="sgd", outer_lr=3e38, outer_momentum=0.0, final="none"),
        [0.1],
        100,
        targets=[1e6],
    )
    world.run(until_s=60.0)
    alarms = world.tape.notes("alarm")
    assert alarms and {a["what"] for a in alarms} == {"merge_not_finite"}, world.story()
    assert {r.data["digest"] for r in world.tape.records if r.type == "MergeDone"} == set(
        world.tape.notes("born")[0]["digests"]
    )
    assert world.syncer.ledger.merged == 0
