"""A gossip learner's tensors against the printed rules, written naively in float64.

Legend: W learners, N parameters. A stack of all learners is ``[W, N]``.
"""

import copy
import json
from collections.abc import Callable

import pytest
import torch
from engine_helpers import inner_step, mlp, plan_of, slots, vector
from torch import Tensor, nn

from farflung.core import mixing
from farflung.core.codecs.base import typed
from farflung.core.vectors import gather, live_tensors
from farflung.engine.held import SavedIsland
from farflung.engine.layout import payload_layout, value_layout
from farflung.engine.make import make_island, slot_sizes
from farflung.engine.peer_island import PeerInner, PeerIsland
from farflung.engine.trainer import Trainer
from farflung.methods import Method, gasloc, gt_dsgdm, ld_sgd
from farflung.protocol.mailbox import Adopt, BoundaryPassed, Load, Mix, Mixed, RunUntil, Show, Snapshot
from farflung.testing.quadratic import QuadraticInner, quadratic_model

TOKENS = 32
ETA, GAMMA, ALPHA = 0.7, 0.5, 0.75


def method_of(momentum_on: str = "mixed", codec: str = "fp32", **changes) -> Method:
    plain = {"outer_lr": ETA, "outer_momentum": GAMMA, "mixing": ALPHA, "codec": codec, "sync_every_steps": 2}
    return gasloc(momentum_on=momentum_on, **{**plain, **changes})


class Gossip:
    """Islands whose vectors are carried by hand. `num_steps`: H of each."""

    def __init__(self, models: list[nn.Module], method: Method, num_steps: list[int] | None = None) -> None:
        self.models, self.method = models, method
        self.plan = plan_of(models[0], method)
        up, down = slot_sizes(self.plan, method)
        self.up, self.down = [slots(up) for _ in models], [slots(down) for _ in models]
        self.islands = [
            PeerIsland(model, self.plan, method, u, d)
            for model, u, d in zip(models, self.up, self.down, strict=True)
        ]
        self.num_steps = num_steps or [method.policy.sync_every_steps] * len(models)
        self.number = 0

    @property
    def x_WN(self) -> Tensor:
        return torch.stack([vector(model) for model in self.models])

    def live(self, learner: int) -> Tensor:
        """Its parameters in the order of the plan."""
        return gather(live_tensors(self.models[learner]), self.plan.fragments[0].pieces)

    def train(self, learner: int) -> list[BoundaryPassed]:
        """The steps of a round, and the offer on its way."""
        island, H = self.islands[learner], self.num_steps[learner]
        island.post(RunUntil(step=island.step + H, reason="the round ends"))
        at_step = island.step + H - self.method.policy.overlap_steps
        island.post(Snapshot(fragment=0, round=self.number, at_step=at_step))
        reports = [r for r in (island.idle(),) if r is not None]
        while island.may_step()[0]:
            inner_step(self.models[learner], learner, island.step)
            reports.append(island.boundary(TOKENS))
        return reports

    def carry(self, sender: int, receiver: int, slot: int) -> None:
        self.down[receiver](slot).copy_(self.up[sender](0))

    def mix(self, learner: int, parts: list[tuple[int, float]]) -> Mixed:
        self.islands[learner].post(Mix(round=self.number, parts=parts, at_step=0))
        report = self.islands[learner].idle()
        assert report is not None and report.mixed is not None
        return report.mixed

    def round(self, weights_WW: Tensor) -> list[Mixed]:
        """All train, all offer, all mix; an entry is alpha M_ij."""
        W = len(self.models)
        for i in range(W):
            self.train(i)
        parts: list[list[tuple[int, float]]] = [[] for _ in range(W)]
        for i in range(W):
            for j in range(W):
                if i != j and weights_WW[i, j]:
                    slot = 1 + len(parts[i])
                    self.carry(j, i, slot)
                    parts[i].append((slot, float(weights_WW[i, j])))
        done = [self.mix(i, parts[i]) for i in range(W)]
        self.number += 1
        return done


def weights(matching: str, W: int, round: int, alpha: float) -> Tensor:
    """alpha M_ij of a round, zero on the diagonal."""
    members = mixing.Members.of([f"{i:02}" for i in range(W)])
    weights_WW = torch.zeros(W, W, dtype=torch.float64)
    for i in range(W):
        for j, weight in mixing.partners(matching, 3, round, members, i):
            weights_WW[i, j] = alpha * weight
    return weights_WW


class Naive:
    """GASLoC as printed, in float64: ``y_t = theta_t + eta g``; V1 momentum on y, V2 on z = y - alpha Lambda y."""

    def __init__(self, models: list[nn.Module], momentum_on: str, num_steps: list[int], overlap: int) -> None:
        self.models = [copy.deepcopy(model).double() for model in models]
        self.local, self.num_steps, self.overlap = momentum_on == "local", num_steps, overlap
        self.theta_WN = torch.stack([vector64(model) for model in self.models])
        self.y_old_WN = self.z_old_WN = self.theta_WN
        self.steps = [0] * len(models)

    def descend(self, i: int, num: int) -> Tensor:
        for _ in range(num):
            inner_step(self.models[i], i, self.steps[i])
            self.steps[i] += 1
        return vector64(self.models[i])

    def round(self, weights_WW: Tensor) -> Tensor:
        early, late = [], []
        for i, H in enumerate(self.num_steps):
            early.append(self.descend(i, max(0, H - self.overlap)))
            late.append(self.descend(i, min(H, self.overlap)))
        offered_WN = self.theta_WN + ETA * (torch.stack(early) - self.theta_WN)
        y_WN = self.theta_WN + ETA * (torch.stack(late) - self.theta_WN)
        laplacian_WW = torch.diag(weights_WW.sum(1)) - weights_WW
        z_WN = y_WN - laplacian_WW @ offered_WN
        moved = y_WN - self.y_old_WN if self.local else z_WN - self.z_old_WN
        self.theta_WN = z_WN + GAMMA * moved
        self.y_old_WN, self.z_old_WN = y_WN, z_WN
        for model, theta in zip(self.models, self.theta_WN, strict=True):
            put(model, theta)
        return self.theta_WN


def vector64(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def put(model: nn.Module, values: Tensor) -> None:
    nn.utils.vector_to_parameters(values.clone(), model.parameters())  # which become views of it


def nets(num: int, make: Callable[[], nn.Module] = mlp) -> list[nn.Module]:
    return [make() for _ in range(num)]


# ---- rounds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("matching", ["random", "ring", "exponential"])
@pytest.mark.parametrize("momentum_on", ["local", "mixed"])
def test_islands_are_gasloc_as_printed(momentum_on: str, matching: str, overlap: int) -> None:
    """Five learners, so one idles where pairs meet; and not all take as many steps a round."""
    num_steps = [2, 2, 3, 2, 4]
    method = method_of(momentum_on, overlap_steps=overlap)
    world = Gossip(nets(5), method, num_steps)
    naive = Naive(nets(5), momentum_on, num_steps, overlap)
    for round in range(6):
        weights_WW = weights(matching, 5, round, ALPHA)
        world.round(weights_WW)
        expected = naive.round(weights_WW)
        torch.testing.assert_close(world.x_WN.double(), expected, rtol=0, atol=2e-6)
        assert all(torch.equal(world.islands[i].base(0), world.live(i)) for i in range(5))


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int4"])
@pytest.mark.parametrize("momentum_on", ["local", "mixed"])
def test_corrections_are_equal_and_opposite_whatever_the_codec_loses(momentum_on: str, codec: str) -> None:
    """Each side takes its own vector as the other decodes it."""
    world = Gossip(nets(2), method_of(momentum_on, codec))
    for _ in range(3):
        for i in range(2):
            world.train(i)
        lonely = copy.deepcopy(world.islands)
        together = []
        for i, j in ((0, 1), (1, 0)):
            world.carry(j, i, 1)
            one = world.mix(i, [(1, ALPHA / 2)])
            assert one.correction > 0
            lonely[i].post(Mix(round=world.number, parts=[], at_step=0))
            lonely[i].idle()
            together.append(world.islands[i].base(0) - lonely[i].base(0))
        world.number += 1
        torch.testing.assert_close(together[0], -together[1], rtol=0, atol=3e-7)


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_the_mean_is_that_of_learners_who_never_met(codec: str) -> None:
    """As long as all take the same drifts: so each round begins where the lonely ones are."""
    method = method_of(codec=codec, sync_every_steps=1)
    world, alone = Gossip(nets(5), method), Gossip(nets(5), method)
    for round in range(4):
        world.round(weights("random", 5, round, ALPHA))
        alone.round(torch.zeros(5, 5))
        mean, expected = world.x_WN.mean(0), alone.x_WN.mean(0)
        assert float((world.x_WN - mean).norm()) < float((alone.x_WN - expected).norm())
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-6)
        for one, other, model in zip(world.islands, alone.islands, alone.models, strict=True):
            one.load_saved(other.save())
            put(world.models[alone.models.index(model)], vector(model))


def test_two_vectors_in_one_payload_are_both_mixed() -> None:
    """GT-DSGDm offers its base and its tracked direction."""
    method = gt_dsgdm(codec="fp32", sync_every_steps=1, outer_momentum=0.9)
    world, models = Gossip(nets(3), method), [copy.deepcopy(m).double() for m in nets(3)]
    x = torch.stack([vector64(m) for m in models])
    y = old = m = torch.zeros_like(x)
    for round in range(5):
        weights_WW = weights("ring", 3, round, 1.0)
        M = weights_WW + torch.diag(1 - weights_WW.sum(1))
        for i, model in enumerate(models):
            inner_step(model, i, round)
        d = torch.stack([vector64(model) for model in models]) - x
        y, old = M @ y + d - old, d
        m = 0.9 * m + y
        x = M @ x + m
        for model, values in zip(models, x, strict=True):
            put(model, values)
        world.round(weights_WW)
        torch.testing.assert_close(world.x_WN.double(), x, rtol=0, atol=2e-6)


def test_a_round_without_partners_takes_its_outer_step() -> None:
    world = Gossip(nets(1), method_of("local"))
    theta = vector(world.models[0])
    world.train(0)
    x = vector(world.models[0])
    done = world.mix(0, [])
    torch.testing.assert_close(
        vector(world.models[0]), theta + (1 + GAMMA) * ETA * (x - theta), rtol=0, atol=1e-6
    )
    assert (done.distances, done.correction) == ([], 0.0)


def test_the_end_of_a_round_says_what_was_trained_and_begins_to_count_anew() -> None:
    world = Gossip(nets(2), method_of(), [2, 3])
    reports = world.train(1)
    assert [t.round for r in reports for t in r.taken] == [0]
    assert reports[-1].taken[0].num_bytes == world.up[1](0).numel()
    done = world.mix(1, [])
    assert (done.round, done.steps, done.tokens) == (0, 3, 3 * TOKENS)
    assert world.islands[1].counters(0) == (0, 0)


def test_distances_and_correction_are_norms() -> None:
    world = Gossip(nets(2), method_of())
    one, other = world.round(weights("complete", 2, 0, ALPHA))
    assert one.distances == other.distances
    (distance,) = one.distances
    assert distance is not None
    assert one.correction == pytest.approx(ALPHA / 2 * distance)


# ---- what is mixed, and what is not ----------------------------------------------------------------------


def ready(num: int, codec: str = "fp32") -> Gossip:
    """Everybody has offered, and learner 0 holds everybody's vector: learner j's in slot j."""
    world = Gossip(nets(num), method_of(codec=codec))
    for i in range(num):
        world.train(i)
    for j in range(1, num):
        world.carry(j, 0, j)
    return world


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_vector_that_is_not_finite_is_left_out_and_said_so(bad: float) -> None:
    world, clean = ready(3), ready(3)
    typed(world.down[0](1), torch.float32)[4] = bad
    done = world.mix(0, [(1, 0.2), (2, 0.3)])
    expected = clean.mix(0, [(2, 0.3)])
    assert done.distances == [None, expected.distances[0]]
    assert torch.equal(world.islands[0].base(0), clean.islands[0].base(0))


def test_a_mix_without_an_offer_mixes_nobody() -> None:
    """Nobody mixed us, so equal and opposite is nothing."""
    world, alone = Gossip(nets(2), method_of()), Gossip(nets(2), method_of())
    for one in (world, alone):
        inner_step(one.models[0], 0, 0)
        one.islands[0].boundary(TOKENS)
    world.train(1)
    world.carry(1, 0, 1)
    assert world.mix(0, [(1, 0.5)]).distances == []
    alone.mix(0, [])
    assert torch.equal(world.islands[0].base(0), alone.islands[0].base(0))


def test_an_offer_that_was_not_taken_when_its_round_ended_is_not_taken_later() -> None:
    world = Gossip(nets(1), method_of())
    world.islands[0].post(Snapshot(fragment=0, round=0, at_step=2))
    world.islands[0].post(Mix(round=0, parts=[], at_step=2))
    reports = []
    for step in range(2):
        inner_step(world.models[0], 0, step)
        reports.append(world.islands[0].boundary(TOKENS))
    assert reports[1].mixed is not None and reports[1].taken == []


def test_a_repeated_mix_changes_nothing() -> None:
    world = ready(2)
    world.mix(0, [(1, 0.5)])
    before = world.x_WN
    world.islands[0].post(Mix(round=0, parts=[(1, 0.5)], at_step=0))
    assert world.islands[0].idle() is None
    assert torch.equal(world.x_WN, before)


def test_a_repeated_offer_is_not_made_again() -> None:
    world = ready(2)
    before = world.up[0](0).clone()
    inner_step(world.models[0], 0, 9)
    world.islands[0].post(Snapshot(fragment=0, round=0))
    assert world.islands[0].idle() is None
    assert torch.equal(world.up[0](0), before)


def test_a_mix_waits_for_its_step() -> None:
    world = ready(2)
    world.islands[0].post(Mix(round=0, parts=[(1, 0.5)], at_step=3))
    assert world.islands[0].idle() is None
    inner_step(world.models[0], 0, 2)
    assert world.islands[0].boundary(TOKENS).mixed is not None


def test_an_own_vector_that_is_not_finite_is_reported() -> None:
    world = Gossip(nets(1), method_of())
    with torch.no_grad():
        next(iter(world.models[0].parameters()))[0] = float("nan")
    world.islands[0].post(Snapshot(fragment=0, round=0))
    report = world.islands[0].idle()
    assert report is not None
    assert [t.finite for t in report.taken] == [False]


def test_only_a_gossip_learners_commands_are_taken() -> None:
    world = Gossip(nets(1), method_of())
    with pytest.raises(TypeError, match="Adopt is not for a gossip learner"):
        world.islands[0].post(Adopt(fragment=0, version=1, included=None))


def test_what_is_queued_can_be_dropped() -> None:
    world = ready(2)
    world.islands[0].post(Mix(round=0, parts=[], at_step=0))
    world.islands[0].drop_queue()
    assert world.islands[0].idle() is None


# ---- buffers and counters --------------------------------------------------------------------------------


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def test_buffers_move_as_parameters_do_and_the_larger_counter_counts() -> None:
    world = Gossip(nets(2, normed), method_of(), [2, 5])
    for i in range(2):
        world.train(i)
    means = [model[1].running_mean.clone() for model in world.models]
    for i, j in ((0, 1), (1, 0)):
        world.carry(j, i, 1)
        world.mix(i, [(1, 0.25)])
    for i, j in ((0, 1), (1, 0)):
        norm = world.models[i][1]
        torch.testing.assert_close(norm.running_mean, means[i] + 0.25 * (means[j] - means[i]))
        assert norm.num_batches_tracked == 5


def test_buffers_that_are_not_finite_keep_their_vector_out() -> None:
    world = Gossip(nets(2, normed), method_of())
    for i in range(2):
        world.train(i)
    world.carry(1, 0, 1)
    layout = payload_layout(world.plan.fragments[0], world.method.codec)
    typed(layout.split(world.down[0](1)).buffers, torch.float32)[0] = float("nan")
    mean = world.models[0][1].running_mean.clone()
    assert world.mix(0, [(1, 0.5)]).distances == [None]
    assert torch.equal(world.models[0][1].running_mean, mean)


# ---- donors, save files, averages ------------------------------------------------------------------------


def grown(momentum_on: str = "local") -> Gossip:
    """Learners with momentum and a last correction."""
    world = Gossip(nets(3), method_of(momentum_on))
    for round in range(3):
        world.round(weights("ring", 3, round, ALPHA))
    return world


@pytest.mark.parametrize("momentum_on", ["local", "mixed"])
def test_a_joiner_holds_its_donors_point_and_momentum_and_a_correction_of_zero(momentum_on: str) -> None:
    world = grown(momentum_on)
    donor, joiner = world.islands[:2]
    donated = donor.donate()
    assert donated == donor.donate()
    joiner.load(Load(versions=[0], cursor=0, step=4, state=True))
    joiner.receive(donated)
    assert joiner.donate() == donated
    held, given = joiner._held[0], donor._held[0]
    assert torch.equal(held.base, given.base) and torch.equal(world.live(1), held.base)
    assert torch.equal(held.state["v"], given.state["v"]) and held.state["v"].any()
    assert momentum_on == "mixed" or (given.state["c"].any() and not held.state["c"].any())
    assert (joiner.step, joiner.counters(0)) == (4, (0, 0))


def test_a_donor_in_the_middle_of_a_round_gives_where_the_round_began() -> None:
    world = grown()
    before = world.islands[0].donate()
    world.train(0)
    assert world.islands[0].donate() == before


def test_state_of_another_size_is_refused() -> None:
    world = grown()
    with pytest.raises(ValueError, match=r"donated state of 10 numbers, \d+ expected"):
        world.islands[0].receive(bytes(40))


def test_what_a_donor_gives_comes_with_the_inner_state_and_has_one_digest() -> None:
    models = [quadratic_model(seed) for seed in (0, 1)]
    world = Gossip(models, ld_sgd(sync_every_steps=2))
    inners = [PeerInner(QuadraticInner(m, 0.5), i) for m, i in zip(models, world.islands, strict=True)]
    inners[0]._inner.steps = 7  # type: ignore[attr-defined]
    state = inners[0].donate()
    inners[1].receive(state)
    assert inners[1]._inner.steps == 7  # type: ignore[attr-defined]
    assert inners[1].digest(inners[1].donate()) == inners[0].digest(state)
    assert torch.equal(vector(models[1]), vector(models[0]))


def test_a_trainer_that_loads_with_state_proves_the_donors_bits() -> None:
    models = [quadratic_model(seed) for seed in (0, 1)]
    method = method_of("mixed")
    plan = plan_of(models[0], method)
    up, down = slot_sizes(plan, method)
    states: list[bytes] = []
    trainers = []
    for model in models:
        downlink = slots(down)
        island, inner = make_island(model, plan, method, slots(up), downlink, QuadraticInner(model, 0.5))
        island.seed()
        trainer = Trainer(
            island, inner, put_state=states.append, get_state=lambda: states[-1], save=lambda: None
        )
        trainers.append(trainer)
    donor, joiner = trainers
    states.append(donor.inner.donate())
    joiner.take(Load(versions=[0], cursor=3, step=4, state=True))
    joiner.idle()
    (loaded,) = joiner.reports
    assert loaded.inner_digest == donor.inner.digest(states[-1])  # type: ignore[union-attr]
    assert torch.equal(vector(models[1]), vector(models[0]))


@pytest.mark.parametrize("momentum_on", ["local", "mixed"])
def test_a_resumed_island_goes_on_bit_for_bit_in_the_middle_of_a_round(momentum_on: str) -> None:
    world = grown(momentum_on)
    island = world.islands[0]
    inner_step(world.models[0], 0, island.step)
    island.boundary(TOKENS)
    saved = island.save()
    meta = json.loads(json.dumps(saved.meta))
    tensors = {name: t.clone() for name, t in saved.tensors.items()}
    model = copy.deepcopy(world.models[0])
    up = slots(slot_sizes(world.plan, world.method)[0])
    resumed = PeerIsland(model, world.plan, world.method, up, world.down[0])
    resumed.load_saved(SavedIsland(tensors=tensors, meta=meta))
    assert resumed.counters(0) == (1, TOKENS)
    for one, net in ((island, world.models[0]), (resumed, model)):
        one.post(Snapshot(fragment=0, round=9))
        inner_step(net, 0, one.step)
        one.boundary(TOKENS)
    world.train(1)
    world.carry(1, 0, 1)
    for one in (island, resumed):
        one.post(Mix(round=9, parts=[(1, 0.5)], at_step=0))
        report = one.idle()
        assert report is not None and report.mixed is not None and report.mixed.steps == 2
    assert torch.equal(vector(model), vector(world.models[0]))
    ours, theirs = island.save(), resumed.save()
    assert all(torch.equal(ours.tensors[n], theirs.tensors[n]) for n in ours.tensors)


def test_parameters_are_shown_as_the_round_began_and_live_at_the_end() -> None:
    world = grown()
    layout = value_layout(world.plan.fragments[0])
    base = world.islands[0].base(0).clone()
    world.train(0)
    for final, expected in ((False, base), (True, world.live(0))):
        report = world.islands[0].show(Show(round=4, final=final))
        assert (report.round, report.final, report.steps, report.num_bytes) == (
            4,
            final,
            2,
            layout.size_bytes,
        )
        assert torch.equal(typed(layout.split(world.up[0](1)).params, torch.float32), expected)


def test_showing_parameters_disturbs_no_offer() -> None:
    world = ready(2)
    before = world.up[0](0).clone()
    world.islands[0].show(Show(round=1))
    assert torch.equal(world.up[0](0), before)
