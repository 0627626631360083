"""The learner's tensors: commands at boundaries, adoption modes, counters, rejoin and resume."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from engine_helpers import World, inner_step, mlp, vector
from torch import Tensor, nn

from farflung.engine.held import SavedIsland
from farflung.engine.island import Island
from farflung.methods import Method, decoupled
from farflung.methods.base import Contribution, Local
from farflung.protocol.actions import Merge, Part
from farflung.protocol.mailbox import Adopt, End, RunUntil, Settle, Snapshot


def free(**options) -> Method:
    return decoupled(**({"num_fragments": 1, "sync_every_steps": 8} | options))


def world_of(num: int = 1, **options) -> World:
    return World([mlp() for _ in range(num)], free(**options)).birth()


def flat(world: World, learner: int = 0, fragment: int = 0) -> Tensor:
    """The live fragment as the island gathers it."""
    return world.islands[learner]._gathered(world.plan.fragments[fragment]).clone()


def value(world: World, fragment: int = 0) -> Tensor:
    return world.hub._fragments[fragment].versions[world.hub.versions[fragment]].params


# ---- order and waiting -----------------------------------------------------------------------------------


def test_adoption_comes_before_the_snapshot_of_the_same_boundary() -> None:
    world = world_of(num_fragments=2)
    island = world.islands[0]
    world.train(0)
    world.merge(0, {})
    version = world.fetch(0, 0)
    island.post(Snapshot(fragment=0, round=1))
    island.post(Snapshot(fragment=1, round=2))
    island.post(Adopt(fragment=0, version=version, included=None))
    report = world.train(0)
    assert report.adopted == [(0, 1)]
    assert [taken.fragment for taken in report.taken] == [1]
    report = world.train(0)
    assert [(t.fragment, t.round, t.base_version, t.steps, t.tokens) for t in report.taken] == [
        (0, 1, 1, 1, 32)
    ]


def test_a_snapshot_waits_for_the_first_step_and_a_final_one_is_skipped() -> None:
    world = world_of()
    assert world.take(0, 0) is None
    report = world.train(0)
    assert len(report.taken) == 1
    other = world_of()
    report = other.take(0, 0, final=True)
    assert report is not None
    assert (report.taken, report.skipped) == ([], [0])
    assert other.train(0).taken == []


def test_a_command_waits_for_its_step() -> None:
    world = world_of()
    world.islands[0].post(Snapshot(fragment=0, round=1, at_step=3))
    assert [len(world.train(0).taken) for _ in range(4)] == [0, 0, 1, 0]


def test_idle_counts_no_step_and_reports_only_what_happened() -> None:
    world = world_of()
    world.train(0)
    island = world.islands[0]
    assert island.idle() is None
    island.post(Snapshot(fragment=0, round=1))
    report = island.idle(cursor=5)
    assert report is not None
    assert (report.step, report.tokens, report.cursor, len(report.taken)) == (1, 0, 5, 1)


def test_a_second_snapshot_waits_until_the_first_has_a_fate() -> None:
    world = world_of()
    world.train(0)
    island = world.islands[0]
    island.post(Snapshot(fragment=0, round=1))
    assert len(world.train(0).taken) == 1
    island.post(Snapshot(fragment=0, round=2))
    assert world.train(0).taken == []
    assert island.open_rounds == [(0, 1)]
    island.post(Settle(fragment=0, round=1, merged=False))
    report = island.idle()
    assert report is not None
    assert [(t.round, t.steps) for t in report.taken] == [(2, 3)]


def test_merged_work_is_not_sent_again_before_it_is_adopted() -> None:
    world = world_of(adoption="rebase")
    world.train(0)
    world.take(0, 0)
    world.merge(0, {0: 1.0})
    island = world.islands[0]
    island.post(Settle(fragment=0, round=0, merged=True))
    island.post(Snapshot(fragment=0, round=1))
    assert world.train(0).taken == []
    island.post(Adopt(fragment=0, version=world.fetch(0, 0), included=0))
    assert [(t.round, t.steps) for t in world.train(0).taken] == [(1, 2)]


def test_merged_work_that_cannot_be_told_apart_is_not_handed_in() -> None:
    world = world_of(adoption="rebase")
    world.train(0)
    world.take(0, 0)
    world.islands[0].post(Settle(fragment=0, round=0, merged=True))
    world.train(0)
    world.round = 1
    report = world.take(0, 0, final=True)
    assert report is not None
    assert (report.taken, report.skipped) == ([], [0])


def test_merged_work_that_was_overwritten_holds_up_nobody() -> None:
    for fate_first in (True, False):
        world = world_of()
        world.train(0)
        world.take(0, 0)
        island, settle = world.islands[0], Settle(fragment=0, round=0, merged=True)
        world.merge(0, {})
        version = world.fetch(0, 0)
        for command in (settle, None) if fate_first else (None, settle):
            island.post(command or Adopt(fragment=0, version=version, included=None))
            island.idle()
        island.post(Snapshot(fragment=0, round=1))
        assert [(t.base_version, t.steps) for t in world.train(0).taken] == [(1, 1)]


def test_repeats_change_nothing() -> None:
    world = world_of()
    world.train(0)
    island = world.islands[0]
    world.take(0, 0)
    world.merge(0, {0: 1.0})
    world.adopt(0, 0, included=0)
    world.train(0)
    before = flat(world), island.counters(0)
    for command in (
        Snapshot(fragment=0, round=0),
        Adopt(fragment=0, version=1, included=0),
        Adopt(fragment=0, version=0, included=None),
        Settle(fragment=0, round=0, merged=False),
    ):
        island.post(command)
    assert island.idle() is None
    assert torch.equal(flat(world), before[0])
    assert island.counters(0) == before[1]


def test_of_two_queued_snapshots_of_a_fragment_the_newer_is_taken() -> None:
    world = world_of()
    for round in (1, 2, 1):
        world.islands[0].post(Snapshot(fragment=0, round=round))
    assert [t.round for t in world.train(0).taken] == [2]
    assert world.train(0).taken == []


def test_run_until_holds_the_learner_and_says_why() -> None:
    world = world_of()
    island = world.islands[0]
    assert island.may_step() == (True, "")
    island.post(RunUntil(step=1, reason="fragment 0, round 3"))
    assert island.may_step() == (True, "")
    world.train(0)
    assert island.may_step() == (False, "fragment 0, round 3")
    island.post(RunUntil(step=None))
    assert island.may_step() == (True, "")


def test_a_command_of_the_driver_is_refused() -> None:
    with pytest.raises(TypeError, match="End is not for the island"):
        world_of().islands[0].post(End(reason="x"))  # type: ignore[arg-type]


# ---- adoption --------------------------------------------------------------------------------------------


def adopt_after_two_windows(included: bool, **options) -> tuple[World, dict[str, Tensor]]:
    """One step, snapshot, two more steps; the hub moves with or without that snapshot; adoption."""
    world = world_of(2, **options)
    kept = {"base": flat(world)}
    world.train(0)
    world.take(0, 0)
    kept["snapshot"] = flat(world)
    world.train(0)
    world.train(0)
    kept["x"] = flat(world)
    world.train(1)
    world.take(1, 0)
    world.merge(0, {0: 0.5, 1: 0.5} if included else {1: 1.0})
    world.adopt(0, 0, included=0 if included else None)
    kept["result"] = value(world)
    return world, kept


@pytest.mark.parametrize("included", [True, False])
def test_overwrite_installs_the_result_and_restarts_the_counters(included: bool) -> None:
    world, kept = adopt_after_two_windows(included)
    assert torch.equal(flat(world), kept["result"])
    assert torch.equal(world.islands[0].base(0), kept["result"])
    assert world.islands[0].counters(0) == (0, 0)


@pytest.mark.parametrize("included", [True, False])
def test_mix_keeps_a_share_and_the_tokens_not_merged(included: bool) -> None:
    world, kept = adopt_after_two_windows(included, adoption="mix", mix_alpha=0.25)
    assert torch.equal(flat(world), 0.25 * kept["x"] + 0.75 * kept["result"])
    assert torch.equal(world.islands[0].base(0), kept["result"])
    assert world.islands[0].counters(0) == ((2, 64) if included else (3, 96))


def test_rebase_keeps_exactly_the_later_work_of_an_included_learner() -> None:
    world, kept = adopt_after_two_windows(True, adoption="rebase")
    assert torch.equal(flat(world), kept["result"] + (kept["x"] - kept["snapshot"]))
    assert world.islands[0].counters(0) == (2, 64)


def test_rebase_keeps_all_work_of_a_learner_left_out_and_moves_its_snapshot() -> None:
    world, kept = adopt_after_two_windows(False, adoption="rebase")
    island, first = world.islands[0], kept["result"].clone()
    x = first + (kept["x"] - kept["base"])
    assert torch.equal(flat(world), x)
    assert island.counters(0) == (3, 96)
    part = Part(object=world.name(0, 0), learner="0", base_version=0, weight=1.0)
    world.hub.merge(Merge(fragment=0, version=2, parts=[part]))
    world.adopt(0, 0, included=0)
    moved = first + (kept["snapshot"] - kept["base"])
    assert torch.equal(flat(world), value(world) + (x - moved))
    assert island.counters(0) == (2, 64)


def test_a_refused_contribution_under_rebase_is_sent_again_with_the_next() -> None:
    world = world_of(adoption="rebase")
    world.train(0)
    world.take(0, 0)
    world.islands[0].post(Settle(fragment=0, round=0, merged=False))
    world.round = 1
    world.islands[0].idle()
    report = world.take(0, 0)
    assert report is not None
    assert (report.taken[0].steps, report.taken[0].tokens) == (1, 32)


def test_other_fragments_are_left_alone() -> None:
    world = world_of(num_fragments=2)
    world.train(0)
    before = flat(world, fragment=1)
    world.merge(0, {})
    world.adopt(0, 0, included=None)
    assert torch.equal(flat(world, fragment=1), before)
    assert world.islands[0].counters(1) == (1, 32)
    assert world.islands[0].versions == [1, 0]


# ---- method state ----------------------------------------------------------------------------------------


def feedback() -> Method:
    """Error feedback: the residual of the decoded payload joins the next one, if the payload was merged."""

    def contribute(local: Local) -> Contribution:
        return Contribution(payload=local.base - local.x + local.state["residual"], pending={})

    def sent(contribution: Contribution, decoded: Tensor) -> dict[str, Tensor]:
        return {"residual": contribution.payload - decoded}

    return replace(
        free(codec="int4"), init=lambda n: {"residual": torch.zeros(n)}, contribute=contribute, sent=sent
    )


def test_method_state_is_committed_by_fate() -> None:
    world = World([mlp()], feedback()).birth()
    island = world.islands[0]
    world.train(0)
    delta = island.base(0) - flat(world)
    world.take(0, 0)
    decoded = world.method.codec.decode(world.up[0](0), delta.numel())
    assert not island.save().tensors["0.state.residual"].any()
    assert torch.equal(island.save().tensors["0.pending.residual"], delta - decoded)
    lost = copy.deepcopy(island._held[0])
    island.post(Settle(fragment=0, round=0, merged=True))
    island.idle()
    assert torch.equal(island.save().tensors["0.state.residual"], delta - decoded)
    island._held[0] = lost
    island.post(Settle(fragment=0, round=0, merged=False))
    island.idle()
    assert not island.save().tensors["0.state.residual"].any()


# ---- birth, rejoin, resume -------------------------------------------------------------------------------


def test_a_learner_that_loads_proves_the_hubs_bits() -> None:
    world = world_of(2, num_fragments=2)
    world.train(1)
    world.islands[1].post(Snapshot(fragment=0, round=1))
    world.islands[1].idle()
    digests = world.install(1, step=7)
    assert digests == [world.hub.digest(i, 0) for i in world.fragments]
    assert torch.equal(vector(world.models[1]), vector(world.models[0]))
    assert (world.islands[1].step, world.islands[1].counters(0)) == (7, (0, 0))
    assert world.islands[1].open_rounds == []


def test_a_bf16_model_has_no_delta_after_installing_and_proves_the_fp32_bits() -> None:
    world = World([mlp().bfloat16() for _ in range(2)], free(outer_lr=0.3)).birth()
    world.train(0)
    world.take(0, 0)
    world.merge(0, {0: 1.0})
    digests = world.install(1)
    assert digests == [world.hub.digest(0, 1)]
    island = world.islands[1]
    assert not torch.equal(island.base(0), value(world))
    assert torch.equal(island.base(0), flat(world, 1))
    assert torch.equal(island.base(0), value(world).bfloat16().float())
    assert world.hub.model_tensors()["0.weight"].dtype == torch.bfloat16


def test_running_statistics_are_seeded_sent_and_adopted() -> None:
    models = [nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)) for _ in range(2)]
    world = World(models, free()).birth()
    for m, num in ((0, 1), (1, 3)):
        for _ in range(num):
            world.train(m)
    means = [model[1].running_mean.clone() for model in models]
    world.sync(0)
    for model in models:
        assert torch.equal(model[1].running_mean, means[0] * 0.5 + means[1] * 0.5)
        assert model[1].num_batches_tracked == 3


@pytest.mark.parametrize("method", [feedback(), free(adoption="rebase")], ids=["feedback", "rebase"])
def test_a_resumed_island_goes_on_bit_for_bit(method: Method) -> None:
    world = World([mlp() for _ in range(2)], method).birth()
    for _ in range(3):
        world.train(0)
    world.take(0, 0)
    world.train(0)
    saved = world.islands[0].save()
    meta = json.loads(json.dumps(saved.meta))
    saved = SavedIsland(tensors={n: t.clone() for n, t in saved.tensors.items()}, meta=meta)
    model = copy.deepcopy(world.models[0])
    resumed = Island(model, world.plan, world.method, world.up[0], world.down[0])
    resumed.load_saved(saved)
    for island, net in ((world.islands[0], world.models[0]), (resumed, model)):
        inner_step(net, 0, island.step)
        island.boundary(32)
    world.merge(0, {0: 1.0})
    version = world.fetch(0, 0)
    for island in (world.islands[0], resumed):
        island.post(Adopt(fragment=0, version=version, included=0))
        assert island.idle() is not None
    assert torch.equal(vector(model), vector(world.models[0]))
    one, other = world.islands[0].save(), resumed.save()
    assert one.meta == other.meta
    assert all(torch.equal(one.tensors[n], other.tensors[n]) for n in one.tensors)


def test_a_saved_island_of_another_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="1 fragments, the plan has 2"):
        world_of(num_fragments=2).islands[0].load_saved(world_of().islands[0].save())
