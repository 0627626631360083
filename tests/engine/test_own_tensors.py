"""Own state as tensors: what is kept, when, and that exactly the right one of two states is put back."""

import copy
import json
from typing import Any

import pytest
import torch
from engine_helpers import World, inner_step, mlp, plan_of, slots, vector
from torch import nn

from farflung.engine.held import SavedIsland
from farflung.engine.island import Island
from farflung.engine.make import make_island, slot_sizes
from farflung.engine.own_state import Own, checked, own_names
from farflung.engine.trainer import Trainer
from farflung.methods import Method, dct_momentum, decoupled, gasloc, sparseloco
from farflung.protocol import mailbox as box
from farflung.protocol.own_state import DAMAGED, OwnState
from farflung.testing.quadratic import QuadraticInner

H = 4


def method_of(**changes: Any) -> Method:
    plain = {"sync_every_steps": H, "codec": "top2-fp32-u16-chunk16", "buffer_decay": 0.9}
    return sparseloco(**{**plain, **changes})


def m_of(world: World, learner: int) -> torch.Tensor:
    return world.islands[learner].save().tensors["0.state.m"].clone()


def copied(world: World, learner: int) -> Own:
    fragments, tensors = world.islands[learner].own()
    about = OwnState(run="r", incarnation=1, step=1, fragments=fragments)
    return Own(about=about, tensors={name: t.clone() for name, t in tensors.items()})


# ---- one of two states -----------------------------------------------------------------------------------


def born() -> World:
    world = World([mlp(0), mlp(0)], method_of()).birth()
    world.train(0)
    world.train(1)
    world.sync(0)
    world.train(0)
    return world


@pytest.mark.parametrize("merged", [True, False])
def test_a_learner_goes_on_as_if_it_had_lived_to_hear_its_fate(merged: bool) -> None:
    world = born()
    world.round += 1
    world.take(0, 0)
    own = copied(world, 0)  # here its process dies
    (fragment,) = own.about.fragments
    assert fragment.round == world.round and fragment.digest != fragment.pending
    world.islands[0].post(box.Settle(fragment=0, round=world.round, merged=merged))
    world.islands[0].idle()
    survivor = m_of(world, 0)
    world.install(1)
    assert not m_of(world, 1).any()
    world.islands[1].take_own(own, [merged])
    assert torch.equal(m_of(world, 1), survivor) and survivor.any()
    assert world.islands[1].own_digests() == [fragment.pending if merged else fragment.digest]


def test_what_was_put_back_is_a_copy() -> None:
    world = born()
    own = copied(world, 0)
    world.install(1)
    world.islands[1].take_own(own, [False])
    own.tensors["0.state.m"].zero_()
    assert m_of(world, 1).any()


def test_between_fate_and_next_snapshot_there_is_one_state_only() -> None:
    (fragment,) = copied(born(), 0).about.fragments
    assert (fragment.round, fragment.pending) == (None, "")


@pytest.mark.parametrize(
    ("method", "names"),
    [
        (decoupled(), ()),
        (sparseloco(), ("m",)),
        (dct_momentum(), ("m",)),
        (gasloc(momentum_on="local", mixing=0.3), ("c",)),
        (gasloc(momentum_on="mixed"), ()),
    ],
    ids=lambda value: value.policy.method if isinstance(value, Method) else "",
)
def test_own_is_what_no_donor_gives(method: Method, names: tuple[str, ...]) -> None:
    assert own_names(method) == names


# ---- an orderly stop -------------------------------------------------------------------------------------


def restarted(world: World, learner: int) -> None:
    """A new process in place of a learner, from what an orderly stop saved."""
    old, model = world.islands[learner], copy.deepcopy(world.models[learner])
    new = make_island(
        model, world.plan, world.method, world.up[learner], world.down[learner], QuadraticInner(model, 0.0)
    )[0]
    meta = json.loads(json.dumps(old.save().meta))
    tensors = {name: t.clone() for name, t in old.save().tensors.items()}
    new.load_saved(SavedIsland(tensors=tensors, meta=meta))
    assert new.own_digests() == old.own_digests()
    world.islands[learner], world.models[learner] = new, model


@pytest.mark.parametrize("stop_at", [0, 1, 3])
def test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(stop_at: int) -> None:
    ends = []
    for stopped in (False, True):
        world = World([mlp(0), mlp(0)], method_of()).birth()
        for round in range(3):
            for step in range(H):
                if stopped and round == 1 and step == stop_at:
                    for learner in (0, 1):
                        restarted(world, learner)
                for learner in (0, 1):
                    world.train(learner)
            world.sync(0)
        ends.append([*map(vector, world.models), m_of(world, 0), m_of(world, 1)])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_a_stop_between_snapshot_and_fate_keeps_both_states() -> None:
    world = born()
    world.round += 1
    world.take(0, 0)
    restarted(world, 0)
    (fragment,) = copied(world, 0).about.fragments
    assert fragment.round == world.round
    world.islands[0].post(box.Settle(fragment=0, round=world.round, merged=True))
    world.islands[0].idle()
    assert world.islands[0].own_digests() == [fragment.pending]


@pytest.mark.parametrize("stop_at", [0, 1, 3])
def test_a_gossip_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(stop_at: int) -> None:
    """Momentum, previous point and live parameters of two learners, each stopped in the middle of a round."""
    method = dct_momentum(sync_every_steps=H, codec="dct-top2-int8-u16-chunk64", outer_lr=0.5)
    ends = []
    for stopped in (False, True):
        pair = Pair(method)
        for round in range(3):
            for step in range(H):
                if stopped and round == 1 and step == stop_at:
                    pair.restart()
                pair.train(round, last=step == H - 1)
            pair.mix(round)
        ends.append(pair.everything())
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


class Pair:
    """Two gossip learners whose vectors are carried by hand."""

    def __init__(self, method: Method) -> None:
        self.models, self.method = [mlp(0), mlp(1)], method
        self.plan = plan_of(self.models[0], method)
        up, down = slot_sizes(self.plan, method)
        self.up, self.down = [slots(up), slots(up)], [slots(down), slots(down)]
        self.islands = [self.island(i, model) for i, model in enumerate(self.models)]

    def island(self, i: int, model: nn.Module) -> Island:
        inner = QuadraticInner(model, 0.0)
        return make_island(model, self.plan, self.method, self.up[i], self.down[i], inner)[0]

    def train(self, round: int, last: bool) -> None:
        for i, (island, model) in enumerate(zip(self.islands, self.models, strict=True)):
            if last:
                island.post(box.Snapshot(fragment=0, round=round))
            inner_step(model, i, island.step)
            island.boundary(10)

    def mix(self, round: int) -> None:
        for i, island in enumerate(self.islands):
            self.down[i](1).copy_(self.up[1 - i](0))
            island.post(box.Mix(round=round, parts=[(1, 0.5)], at_step=0))
        for island in self.islands:
            assert island.idle() is not None

    def restart(self) -> None:
        for i, old in enumerate(self.islands):
            self.models[i] = copy.deepcopy(self.models[i])
            self.islands[i] = self.island(i, self.models[i])
            saved = old.save()
            tensors = {name: t.clone() for name, t in saved.tensors.items()}
            self.islands[i].load_saved(SavedIsland(tensors=tensors, meta=json.loads(json.dumps(saved.meta))))
            assert self.islands[i].own_digests() == old.own_digests()

    def everything(self) -> list[torch.Tensor]:
        saved = [island.save().tensors for island in self.islands]
        return [*map(vector, self.models), *(t for one in saved for _, t in sorted(one.items()))]


# ---- what a disk gives -----------------------------------------------------------------------------------


def spoil(own: Own, how: str) -> Own:
    tensors = dict(own.tensors)
    if how == "bit":
        tensors["0.pending.m"] = tensors["0.pending.m"].clone()
        tensors["0.pending.m"].view(torch.uint8)[5] ^= 1
    elif how == "shape":
        tensors["0.state.m"] = tensors["0.state.m"][:-1]
    else:
        del tensors["0.state.m"]
    return Own(about=own.about, tensors=tensors)


@pytest.mark.parametrize("how", ["bit", "shape", "missing"])
def test_what_is_not_what_its_digests_say_is_damaged(how: str) -> None:
    world = born()
    world.round += 1
    world.take(0, 0)
    own, sizes = copied(world, 0), [world.plan.fragments[0].num_elements]
    assert checked(own, world.method, sizes) is own
    damaged = checked(spoil(own, how), world.method, sizes)
    assert damaged.about == OwnState(problem=DAMAGED) and not damaged.tensors


# ---- when it is kept -------------------------------------------------------------------------------------


class Keeper:
    """A trainer whose own state is kept in memory."""

    def __init__(self, method: Method) -> None:
        self.model = mlp(0)
        plan = plan_of(self.model, method)
        up, down = slot_sizes(plan, method)
        self.inner = QuadraticInner(self.model, 0.0)
        self.down = slots(down)
        island, inner = make_island(self.model, plan, method, slots(up), self.down, self.inner)
        self.kept: list[tuple[Own, int]] = []  # and how many reports had been made
        self.trainer = Trainer(
            island, inner, put_state=lambda s: None, get_state=bytes, save=lambda: None, keep=self.keep
        )
        self.island = island

    def keep(self, own: Own) -> None:
        tensors = {name: t.clone() for name, t in own.tensors.items()}
        self.kept.append((Own(about=own.about, tensors=tensors), len(self.trainer.reports)))

    def install(self, incarnation: int = 1, step: int = 0, own: list[bool] | None = None) -> box.Loaded:
        self.island.seed()
        self.trainer.take(box.Begin(run="r", incarnation=incarnation, index=0))
        self.trainer.take(box.Load(versions=[0], cursor=0, step=step, state=False, own=own))
        self.trainer.idle()
        (loaded,) = [r for r in self.trainer.reports if isinstance(r, box.Loaded)]
        self.trainer.reports.clear()
        return loaded

    def step(self) -> None:
        inner_step(self.model, 0, self.island.step)
        self.trainer.stepped(10, step_s=0.1)

    @property
    def steps(self) -> list[int]:
        return [own.about.step for own, _ in self.kept]


def test_own_state_is_kept_at_once_and_then_at_least_every_h_steps() -> None:
    keeper = Keeper(method_of())
    keeper.install()
    for _ in range(2 * H + 1):
        keeper.step()
    assert keeper.steps == [0, H, 2 * H]


def test_own_state_is_kept_before_what_it_goes_with_is_reported() -> None:
    keeper = Keeper(method_of())
    keeper.install()
    keeper.trainer.take(box.Snapshot(fragment=0, round=1))
    keeper.step()
    own, reports = keeper.kept[-1]
    assert (own.about.step, reports) == (1, 0)
    assert own.about.fragments[0].round == 1
    assert keeper.trainer.reports[0].taken[0].round == 1


def test_a_gossip_learner_keeps_at_the_end_of_its_round() -> None:
    keeper = Keeper(dct_momentum(sync_every_steps=H, codec="dct-top2-int8-u16-chunk64", outer_lr=0.5))
    keeper.install()
    keeper.trainer.take(box.Mix(round=0, parts=[], at_step=2))
    for _ in range(3):
        keeper.step()
    assert keeper.steps == [0, 2]
    assert keeper.kept[-1][0].tensors["0.state.m"].any()
    assert set(keeper.kept[-1][0].tensors) == {"0.state.m"}


def test_a_method_without_own_state_keeps_nothing() -> None:
    keeper = Keeper(decoupled(num_fragments=1, sync_every_steps=H))
    assert keeper.install().own_digests == []
    for _ in range(2 * H):
        keeper.step()
    assert not keeper.kept


def test_a_second_crash_finds_what_the_first_one_left() -> None:
    """Kept again under the new incarnation, before the first step."""
    keeper = Keeper(method_of())
    keeper.install()
    keeper.trainer.take(box.Snapshot(fragment=0, round=1))
    keeper.step()
    heir = Keeper(method_of())
    heir.trainer.found = keeper.kept[-1][0]
    loaded = heir.install(incarnation=2, step=9, own=[True])
    own, _ = heir.kept[0]
    assert (own.about.incarnation, own.about.step) == (2, 9)
    assert [f.digest for f in own.about.fragments] == loaded.own_digests
    assert loaded.own_digests == [keeper.kept[-1][0].about.fragments[0].pending]
    heir.step()
    assert heir.trainer.found is None


def test_who_found_nothing_cannot_claim_what_the_hub_expects() -> None:
    heir = Keeper(method_of())
    zero = heir.install().own_digests
    assert heir.install(own=[True]).own_digests == zero
