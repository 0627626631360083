"""The downlink as increments: hub and learners hold equal bits, and what a codec cuts off arrives later."""

import pytest
import torch
from engine_helpers import World, mlp
from torch import Tensor, nn

from farflung.engine.hub import HubState
from farflung.methods import Method, decoupled, diloco
from farflung.protocol.actions import Merge, Part
from farflung.protocol.mailbox import Adopt

CODECS = ["bf16", "int8", "top64-2bit-12bit", "dct-top32-int8-12bit", "rows64-bf16", "1bit"]


def world(method: Method) -> World:
    models: list[nn.Module] = [mlp(0, 64), mlp(1, 64)]
    return World(models, method).birth()


def hub_method(codec: str | None, **more: object) -> Method:
    settings = {"num_fragments": 2, "merge": "avg", "overlap_steps": 0, **more}
    return decoupled(downlink_codec=codec, **settings)


def merge(made: World, number: int, final: bool = False) -> None:
    """A new version of every fragment from a made-up delta, the same in all worlds."""
    for p in made.fragments:
        size = made.plan.fragments[p].num_elements
        delta = torch.randn(size, generator=torch.Generator().manual_seed(100 * number + p)) / 100
        made.hub.receive(f"{p}.{number}", p, delta.view(torch.uint8))
        present = made.hub.versions[p]
        part = Part(object=f"{p}.{number}", learner="0", base_version=present, weight=1.0)
        made.hub.merge(Merge(fragment=p, version=present + 1, parts=[part], final=final))


def adopt_by_increments(made: World, learner: int, fragment: int) -> None:
    """From the version held to the newest, from increments alone: the rest of the slot is spoilt."""
    island, newest = made.islands[learner], made.hub.versions[fragment]
    base = island.versions[fragment]
    raw = made.hub.increment_bytes(fragment, base, newest)
    slot = made.down[learner](fragment)
    slot.fill_(0xFF)
    slot[: len(raw)].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    island.post(Adopt(fragment=fragment, version=newest, included=None, base_version=base))
    island.idle()


def hub_value(hub: HubState, fragment: int) -> Tensor:
    raw = hub.value_bytes(fragment, hub.versions[fragment])
    size = hub.plan.fragments[fragment].num_elements
    return torch.frombuffer(bytearray(raw), dtype=torch.float32)[:size]


@pytest.mark.parametrize("codec", CODECS)
def test_a_learner_that_adds_increments_holds_the_hubs_bits(codec: str) -> None:
    made = world(hub_method(codec))
    for number in range(6):
        merge(made, number)
        for fragment in made.fragments:
            for learner in range(2):
                adopt_by_increments(made, learner, fragment)
                assert torch.equal(made.islands[learner].base(fragment), hub_value(made.hub, fragment))


def test_several_increments_at_once_are_the_same_as_one_by_one() -> None:
    made = world(hub_method("int8"))
    for number in range(3):
        merge(made, number)
        for fragment in made.fragments:
            adopt_by_increments(made, 0, fragment)  # the other learner is away for three versions
    for fragment in made.fragments:
        adopt_by_increments(made, 1, fragment)
        assert torch.equal(made.islands[1].base(fragment), made.islands[0].base(fragment))


def test_what_the_codec_cuts_off_is_carried_to_later_versions() -> None:
    """Theta_t + e_t is what the hub would hold without a codec, for an outer step that Theta does not enter."""
    lossy, exact = (
        world(hub_method(c, outer="sgd", outer_lr=0.5, outer_momentum=0.0)) for c in ("1bit", None)
    )
    before = torch.cat([hub_value(lossy.hub, p) for p in lossy.fragments])
    for number in range(5):
        for made in (lossy, exact):
            merge(made, number)
    cut = torch.cat([lossy.hub.save()[f"{p}.downlink.unsent"] for p in lossy.fragments])
    got = torch.cat([hub_value(lossy.hub, p) for p in lossy.fragments])
    want = torch.cat([hub_value(exact.hub, p) for p in exact.fragments])
    assert not torch.allclose(got, want, atol=1e-4) and not torch.equal(want, before)
    torch.testing.assert_close(got + cut, want, rtol=0, atol=1e-6)


def test_sizes_are_known_beforehand() -> None:
    made = world(hub_method("top16-int8-12bit"))
    merge(made, 0)
    for p in made.fragments:
        assert len(made.hub.increment_bytes(p, 0, 1)) == made.hub.increment_size(p)
        assert made.hub.value_size(p) > 16 * made.hub.increment_size(p)


def test_increments_end_with_their_versions_and_with_the_process() -> None:
    made = world(hub_method("int8"))
    for number in range(3):
        merge(made, number)
    made.hub.retire(0, 1)
    with pytest.raises(KeyError):
        made.hub.increment_bytes(0, 0, 3)
    assert len(made.hub.increment_bytes(0, 1, 3)) == 2 * made.hub.increment_size(0)
    restarted = HubState(made.plan, made.method)
    restarted.load(made.hub.save())
    with pytest.raises(KeyError):
        restarted.increment_bytes(0, 2, 3)
    saved, loaded = made.hub.save(), restarted.save()
    assert torch.equal(saved["0.downlink.unsent"], loaded["0.downlink.unsent"])


def test_more_increments_than_the_value_is_large_are_refused() -> None:
    made = world(hub_method("bf16"))
    for number in range(2):
        merge(made, number)
    with pytest.raises(KeyError):
        made.hub.increment_bytes(0, 0, 2)
    with pytest.raises(KeyError):
        world(hub_method(None)).hub.increment_bytes(0, 0, 1)


def test_the_last_average_is_not_rounded() -> None:
    lossy, exact = world(diloco(downlink_codec="1bit")), world(diloco())
    for made in (lossy, exact):
        merge(made, 0, final=True)
    assert torch.equal(hub_value(lossy.hub, 0), hub_value(exact.hub, 0))


def test_increments_upon_another_base_are_refused() -> None:
    made = world(hub_method("int8"))
    for number in range(2):
        merge(made, number)
    made.islands[0].post(Adopt(fragment=0, version=2, included=None, base_version=1))
    with pytest.raises(ValueError, match="from version 1, held is 0"):
        made.islands[0].idle()


def test_parameters_that_cannot_hold_the_hubs_value_are_refused() -> None:
    with pytest.raises(ValueError, match=r"increments need fp32 parameters, 0\.weight is torch\.bfloat16"):
        World([mlp(0).bfloat16()], hub_method("int8"))
