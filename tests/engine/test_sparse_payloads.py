"""Sparse payloads in the engine: sizes known before, shapes of tensors, a new draw each round, state by fate."""

import pytest
import torch
from engine_helpers import World, inner_step, mlp, plan_of, slots
from torch import Tensor

from farflung.core.codecs import SparseCodec
from farflung.engine.buffers import digest
from farflung.engine.make import slot_sizes
from farflung.engine.peer_island import PeerIsland
from farflung.methods import Method, dct_momentum, gt_dsgdm, make_method, random_rows, sparseloco
from farflung.protocol.mailbox import Mix, Settle, Snapshot

CODECS = [
    "top4-fp32-u16-tensors",
    "dct-top3-int8-12bit-tensors",
    "random2-fp32-chunk8",
    "dct-top8-bf16-gaps-chunk16",
]
HUB = ["dct_momentum_shared", "demo", "muloco", "random_rows", "sparseloco"]


def world_of(method: Method, num: int = 3) -> World:
    return World([mlp(seed) for seed in range(num)], method).birth()


def m_of(world: World, learner: int, fragment: int = 0) -> Tensor:
    return world.islands[learner].save().tensors[f"{fragment}.state.m"].clone()


def trained_round(world: World, fragment: int) -> None:
    for learner in range(len(world.islands)):
        world.train(learner)
    world.sync(fragment)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", HUB)
def test_a_payload_is_as_long_as_was_known_and_learners_agree(name: str, codec: str) -> None:
    world = world_of(make_method(name, codec=codec, num_fragments=2, sync_every_steps=8))
    up, _ = slot_sizes(world.plan, world.method)
    for _ in range(3):
        for i in world.fragments:
            trained_round(world, i)
            sizes = {world.hub.payload_size(i), up(i), *(len(u(i)) for u in world.up)}
            assert len(sizes) == 1
            assert len({world.hub.digest(i, world.hub.versions[i]), *bases(world, i)}) == 1


def bases(world: World, fragment: int) -> set[str]:
    return {digest(island.base(fragment)) for island in world.islands}


def test_learners_hold_equal_bits_after_100_rounds() -> None:
    world = world_of(sparseloco(codec="top4-2bit-u16-chunk16"))
    for _ in range(100):
        trained_round(world, 0)
    assert bases(world, 0) == {world.hub.digest(0, 100)}


def test_chunks_along_tensors_follow_the_pieces_of_each_fragment() -> None:
    world = world_of(sparseloco(codec="dct-top3-int8-12bit-tensors", num_fragments=2))
    for i, fragment in enumerate(world.plan.fragments):
        codec = world.islands[0]._codecs[i]
        assert isinstance(codec, SparseCodec) and codec.shapes is not None
        assert sum(torch.Size(shape).numel() for shape in codec.shapes) == fragment.num_elements
        assert len(codec.shapes) == len(fragment.pieces)


def test_every_round_draws_anew_and_the_hub_decodes_what_was_drawn() -> None:
    """``sum of steps / alpha = mean of what left the buffers``; any 7 rounds hold all 4 draws of a turn."""
    world = world_of(random_rows(codec="random2-fp32-chunk8-seed3", buffer_decay=1.0, outer_lr=0.5))
    start, worked = world.islands[0].base(0).clone(), torch.zeros(3, world.plan.fragments[0].num_elements)
    moved, theta = torch.zeros_like(start), start
    for _ in range(7):
        for learner in range(3):
            world.train(learner)
            worked[learner] += theta - world.islands[learner]._gathered(world.plan.fragments[0])
        world.sync(0)
        new = world.islands[0].base(0).clone()
        moved += (new != theta).float()
        assert 0 < int((new != theta).sum()) <= -(-len(theta) // 8) * 2 + 8
        theta = new
    left = torch.stack([m_of(world, learner) for learner in range(3)])
    torch.testing.assert_close((start - theta) / 0.5, (worked - left).mean(0), rtol=0, atol=1e-5)
    assert (moved > 0).all()


@pytest.mark.parametrize("name", HUB)
def test_the_buffer_is_committed_by_fate(name: str) -> None:
    world = world_of(make_method(name, codec="top4-int8-u16-chunk16"))
    trained_round(world, 0)
    before = [m_of(world, learner) for learner in range(3)]
    assert all(m.any() for m in before)
    world.round += 1
    for learner in range(3):
        world.train(learner)
        world.take(learner, 0)
    world.islands[1].post(Settle(fragment=0, round=world.round, merged=False))
    world.islands[1].idle()
    world.merge(0, {0: 0.5, 2: 0.5})
    for learner in (0, 1, 2):
        world.adopt(learner, 0, None if learner == 1 else world.round)
    assert torch.equal(m_of(world, 1), before[1])
    assert not any(torch.equal(m_of(world, learner), before[learner]) for learner in (0, 2))


def test_a_learner_that_loads_has_nothing_unsent() -> None:
    world = world_of(sparseloco(codec="top4-int8-u16-chunk16"))
    trained_round(world, 0)
    world.install(1)
    assert not m_of(world, 1).any() and m_of(world, 0).any()


# ---- gossip ------------------------------------------------------------------------------------------------


def peers(method: Method, num: int = 2) -> tuple[list[PeerIsland], list, list]:
    models = [mlp(seed) for seed in range(num)]
    plan = plan_of(models[0], method)
    up, down = slot_sizes(plan, method)
    ups, downs = [slots(up) for _ in models], [slots(down) for _ in models]
    made = [PeerIsland(model, plan, method, u, d) for model, u, d in zip(models, ups, downs, strict=True)]
    island_model.update({id(island): model for island, model in zip(made, models, strict=True)})
    return made, ups, downs


island_model: dict[int, torch.nn.Module] = {}


def live(island: PeerIsland) -> Tensor:
    return island._gathered(island.plan.fragments[0]).clone()


def meet(
    islands: list[PeerIsland], ups: list, downs: list, round: int, trained: list[Tensor] | None = None
) -> list:
    """All train a step and offer, all get all, all mix with equal weights."""
    num, reports = len(islands), []
    for learner, island in enumerate(islands):
        inner_step(island_model[id(island)], learner, island.step)
        island.boundary(8)
        island.post(Snapshot(fragment=0, round=round))
        island.idle()
    if trained is not None:
        trained.extend(map(live, islands))
    for i, island in enumerate(islands):
        others = [j for j in range(num) if j != i]
        for place, j in enumerate(others, start=1):
            downs[i](place).copy_(ups[j](0))
        island.post(Mix(round=round, parts=[(p, 1 / num) for p in range(1, num)], at_step=0))
        reports.append(island.idle())
    return reports


@pytest.mark.parametrize("codec", CODECS)
def test_partners_cut_along_tensors_too_also_with_two_vectors(codec: str) -> None:
    islands, ups, downs = peers(gt_dsgdm(codec=codec))
    for round in range(2):
        for report in meet(islands, ups, downs, round):
            assert report is not None and report.mixed is not None
            assert report.mixed.distances[0] is not None
    assert len(ups[0](0)) == islands[0].payload_size(0)


@pytest.mark.parametrize("reduce", ["world", "contributors"])
def test_three_peers_follow_the_authors_rule_with_decoded_payloads(reduce: str) -> None:
    method, num, eta, beta = dct_momentum(codec="top3-int8-u16-chunk16", reduce=reduce), 3, 0.7, 0.95
    islands, ups, downs = peers(method, num)
    fragment = islands[0].plan.fragments[0]
    theta_WN = torch.stack([island.base(0) for island in islands])
    m_WN = torch.zeros_like(theta_WN)
    for round in range(4):
        before = theta_WN.clone()
        trained: list[Tensor] = []
        meet(islands, ups, downs, round, trained)
        g_WN = before - torch.stack(trained)
        m_WN = beta * m_WN + g_WN
        q_WN = torch.stack([method.codec.decode(up(0), fragment.num_elements) for up in ups])
        share = num if reduce == "world" else (q_WN != 0).sum(0).clamp(min=1)
        m_WN = m_WN - q_WN + q_WN.sum(0) / share
        theta_WN = before - eta * (g_WN + beta * m_WN)
        torch.testing.assert_close(torch.stack([i.base(0) for i in islands]), theta_WN, rtol=0, atol=1e-5)
        theta_WN = torch.stack([i.base(0) for i in islands])


def test_a_partners_payload_that_no_encoder_writes_is_left_out() -> None:
    method = dct_momentum(codec="top3-int8-u16-chunk16")
    islands, ups, downs = peers(method)
    meet(islands, ups, downs, 0)
    islands[0].boundary(8)
    islands[0].post(Snapshot(fragment=0, round=1))
    islands[0].idle()
    downs[0](1).copy_(ups[1](0))[-8:] = 255
    islands[0].post(Mix(round=1, parts=[(1, 0.5)], at_step=0))
    report = islands[0].idle()
    assert report is not None and report.mixed is not None and report.mixed.distances == [None]
    assert torch.isfinite(islands[0].base(0)).all()
