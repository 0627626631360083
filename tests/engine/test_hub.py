"""The hub's tensors: merges, refusals, versions and their bytes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from farflung.core.fragments import FragmentPlan, make_plan
from farflung.core.merge import rda
from farflung.core.vectors import describe
from farflung.engine import buffers
from farflung.engine.hub import HubState
from farflung.methods import Method, decoupled, diloco
from farflung.protocol.actions import Merge, Part

N = 6


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(N))


def raw(values: Tensor) -> bytes:
    return values.numpy().tobytes()


def hub_of(method: Method, theta: Tensor | None = None) -> HubState:
    hub = HubState(make_plan(describe(Tiny()), 1), method)
    hub.seed(0, raw(torch.arange(1.0, N + 1) if theta is None else theta))
    return hub


def value(hub: HubState, version: int, fragment: int = 0) -> Tensor:
    return torch.frombuffer(bytearray(hub.value_bytes(fragment, version)), dtype=torch.float32)


def merge(hub: HubState, *deltas: Tensor, bases: list[int] | None = None, final: bool = False):
    version = hub.versions[0] + 1
    parts = []
    for i, delta in enumerate(deltas):
        hub.receive(f"c{i}.{version}", 0, raw(delta))
        base = bases[i] if bases else hub.versions[0]
        parts.append(
            Part(object=f"c{i}.{version}", learner=str(i), base_version=base, weight=1 / len(deltas))
        )
    return hub.merge(Merge(fragment=0, version=version, parts=parts, final=final))


def test_a_part_is_cut_down_before_it_is_anchored_and_merged() -> None:
    method = one_fragment(outer="nesterov", anchor="present")
    cut, wanted = hub_of(method), hub_of(method)
    big, small, late = torch.randn(N), torch.randn(N), torch.randn(N)
    for hub, given in ((cut, 4 * big), (wanted, big)):
        merge(hub, small)
        hub.receive("late", 0, raw(late))
        hub.receive("big", 0, raw(given))
        parts = [
            Part(object="late", learner="a", base_version=0, weight=0.5),
            Part(object="big", learner="b", base_version=0, weight=0.5, scale=0.25 if hub is cut else None),
        ]
        hub.merge(Merge(fragment=0, version=2, parts=parts))
    assert torch.equal(value(cut, 2), value(wanted, 2))


SGD1 = {"outer": "sgd", "outer_lr": 1.0, "outer_momentum": 0.0}


def one_fragment(**options) -> Method:
    return decoupled(num_fragments=1, sync_every_steps=4, overlap_steps=2, **options)


def test_a_seed_is_served_as_it_came() -> None:
    theta = torch.randn(N)
    hub = hub_of(diloco(), theta)
    assert bytes(hub.value_bytes(0, 0)) == raw(theta)
    assert hub.value_size(0) == 4 * N
    assert hub.versions == [0]


def test_rda_with_one_contributor_is_its_input() -> None:
    hub = hub_of(one_fragment(**SGD1))
    delta = torch.randn(N)
    merge(hub, delta)
    assert torch.equal(value(hub, 1), value(hub, 0) - delta)


def test_several_contributions_are_merged_by_the_rule() -> None:
    hub = hub_of(one_fragment(**SGD1))
    deltas = [torch.randn(N) for _ in range(3)]
    merge(hub, *deltas)
    torch.testing.assert_close(value(hub, 1), value(hub, 0) - rda(deltas, [1 / 3] * 3))


def test_the_embedding_has_its_own_rule_and_rda_keeps_one_norm_a_tensor() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))
    plan = make_plan(describe(model), 1)
    hub = HubState(plan, one_fragment(**SGD1))
    size = plan.fragments[0].num_elements
    hub.seed(0, raw(torch.zeros(size)))
    one, two = torch.randn(size), torch.randn(size)
    merge(hub, one, two)
    for piece in plan.fragments[0].pieces:
        at = slice(piece.offset, piece.offset + piece.length)
        a, b = one[at].double(), two[at].double()
        if piece.embedding:
            want = (a + b) / 2
        else:
            direction = (a / a.norm() + b / b.norm()) / 2
            want = (a.norm() + b.norm()) / 2 * direction / direction.norm()
        torch.testing.assert_close(value(hub, 1)[at], -want.float())


def test_a_contribution_that_is_not_finite_is_seen_on_receipt() -> None:
    hub = hub_of(diloco())
    assert hub.receive("good", 0, raw(torch.full((N,), 2.0))) == (True, pytest.approx(2 * N**0.5))
    for bad in (float("nan"), float("inf")):
        delta = torch.zeros(N)
        delta[3] = bad
        assert hub.receive("bad", 0, raw(delta)) == (False, None)


def test_a_contribution_of_the_wrong_size_is_refused_in_one_line_with_its_name() -> None:
    hub = hub_of(diloco())
    with pytest.raises(ValueError, match=r"^c1: .*need 24 bytes$"):
        hub.receive("c1", 0, b"123")


def test_a_merge_that_overflows_repeats_the_value_and_leaves_the_outer_state() -> None:
    hub, other = hub_of(diloco()), hub_of(diloco())
    delta, huge = torch.randn(N), torch.full((N,), 3e38)
    first, _ = merge(hub, delta), merge(other, delta)
    result = merge(hub, -huge, -huge)
    assert result == (2, False, 0.0, first.digest)
    assert torch.equal(value(hub, 2), value(hub, 1))
    merge(hub, delta)
    merge(other, delta)
    assert torch.equal(value(hub, 3), value(other, 2))


def test_a_merge_without_parts_repeats_the_value() -> None:
    hub = hub_of(diloco())
    assert merge(hub) == (1, True, 0.0, hub.digest(0, 0))
    assert torch.equal(value(hub, 1), value(hub, 0))


def test_zero_deltas_change_nothing_at_first() -> None:
    hub = hub_of(diloco())
    assert merge(hub, torch.zeros(N), torch.zeros(N)).digest == hub.digest(0, 0)


@pytest.mark.parametrize("anchor", ["present", "base"])
def test_stale_work_is_anchored_as_the_policy_says(anchor: str) -> None:
    hub = hub_of(one_fragment(anchor=anchor, **SGD1))
    stale, step = torch.randn(N), torch.randn(N)
    merge(hub, step)
    merge(hub, stale, bases=[0])
    theta_0, theta_1 = value(hub, 0), value(hub, 1)
    anchored = stale + (theta_1 - theta_0) if anchor == "present" else stale
    assert torch.equal(value(hub, 2), theta_1 - anchored)


def test_a_final_merge_is_a_plain_average_and_leaves_the_outer_state() -> None:
    hub, other = hub_of(diloco()), hub_of(diloco())
    delta, last = torch.randn(N), torch.randn(N)
    for h in (hub, other):
        merge(h, delta)
    merge(hub, last, last, final=True)
    assert torch.equal(value(hub, 2), value(hub, 1) - last)
    merge(hub, torch.zeros(N), final=False)
    merge(other, torch.zeros(N))
    torch.testing.assert_close(value(hub, 3) - value(hub, 2), value(other, 2) - value(other, 1))


def test_a_final_merge_takes_the_outer_step_if_asked_to() -> None:
    hub, other = hub_of(diloco(final="outer")), hub_of(diloco(final="outer"))
    delta = torch.randn(N)
    assert merge(hub, delta, final=True) == merge(other, delta)


def test_merged_and_discarded_contributions_are_gone() -> None:
    hub = hub_of(diloco())
    merge(hub, torch.ones(N))
    hub.receive("late", 0, raw(torch.ones(N)))
    hub.discard("late")
    hub.discard("late")
    for name in ("late", "c0.1"):
        part = Part(object=name, learner="0", base_version=1, weight=1.0)
        with pytest.raises(KeyError):
            hub.merge(Merge(fragment=0, version=2, parts=[part]))


def test_bytes_being_served_do_not_change_when_their_version_is_retired() -> None:
    hub = hub_of(diloco())
    served = hub.value_bytes(0, 0)[4:12]
    before = bytes(served)
    for version in range(6):
        merge(hub, torch.randn(N))
        hub.retire(0, version)
    assert bytes(served) == before
    with pytest.raises(TypeError):
        served[0] = 1


def test_memory_stays_flat_over_many_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    init = buffers.Buffer.__init__
    monkeypatch.setattr(buffers.Buffer, "__init__", lambda self, n: (made.append(n), init(self, n))[1])
    hub = hub_of(diloco())
    for version in range(100):
        merge(hub, torch.randn(N), torch.full((N,), float("nan") if version % 3 else 1.0))
        bytes(hub.value_bytes(0, version + 1))
        hub.retire(0, version)
    assert len(made) <= 8


def test_buffers_are_averaged_and_counters_take_the_maximum() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    plan = make_plan(describe(model), 1)
    hub = HubState(plan, diloco(codec="int4"))
    layout = hub._fragments[0].payload_layout

    def payload(mean: float, count: int) -> Tensor:
        out = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        sections = layout.split(out)
        sections.buffers.view(torch.float32).fill_(mean)
        sections.counters.view(torch.int64).fill_(count)
        return out

    hub.seed(0, torch.zeros(hub.value_size(0), dtype=torch.uint8))
    hub.receive("a", 0, payload(1.0, 7))
    hub.receive("b", 0, payload(5.0, 2**40 + 1))
    parts = [Part(object=n, learner=n, base_version=0, weight=w) for n, w in (("a", 0.25), ("b", 0.75))]
    hub.merge(Merge(fragment=0, version=1, parts=parts))
    tensors = hub.model_tensors()
    assert torch.equal(tensors["1.running_mean"], torch.full((2,), 4.0))
    assert tensors["1.num_batches_tracked"] == 2**40 + 1
    assert tensors["0.weight"].shape == (2, 3)


def test_a_buffer_that_is_not_finite_spoils_no_merge() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    hub = HubState(make_plan(describe(model), 1), diloco())
    hub.seed(0, torch.zeros(hub.value_size(0), dtype=torch.uint8))
    layout = hub._fragments[0].payload_layout
    bad = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    layout.split(bad).params.view(torch.float32).fill_(1.0)
    layout.split(bad).buffers.view(torch.float32).fill_(float("nan"))
    assert not hub.receive("bad", 0, bad).finite
    part = Part(object="bad", learner="0", base_version=0, weight=1.0)
    assert hub.merge(Merge(fragment=0, version=1, parts=[part])).digest == hub.digest(0, 0)
    assert torch.equal(hub.save()["0.outer.momentum"], torch.zeros(N + 6))


def test_a_restored_hub_goes_on_bit_for_bit() -> None:
    hub = hub_of(diloco())
    deltas = [torch.randn(N) for _ in range(4)]
    merge(hub, deltas[0])
    merge(hub, deltas[1])
    saved = hub.save()
    other = hub_of(diloco(), torch.zeros(N))
    other.load({name: values.clone() for name, values in saved.items()})
    assert (other.versions, other.kept(0)) == (hub.versions, hub.kept(0))
    assert merge(hub, deltas[2], bases=[1]) == merge(other, deltas[2], bases=[1])


def test_a_saved_state_does_not_change_while_training_goes_on() -> None:
    hub = hub_of(diloco())
    merge(hub, torch.randn(N))
    saved = hub.save()
    copies = {name: values.clone() for name, values in saved.items()}
    for version in range(4):
        merge(hub, torch.randn(N))
        hub.retire(0, version)
    assert all(torch.equal(saved[name], copies[name]) for name in copies)


def test_a_checkpoint_that_is_not_the_hubs_is_refused() -> None:
    hub = hub_of(diloco())
    with pytest.raises(ValueError, match="'x' is not the hub's"):
        hub.load({"x": torch.zeros(1)})
    with pytest.raises(ValueError, match="no version of fragment 0"):
        hub.load({})


def test_a_base_retired_while_a_merge_waits_or_runs_does_not_disturb_it() -> None:
    stale, step = torch.randn(N), torch.randn(N)
    results = []
    for retire in (False, True):
        hub = hub_of(one_fragment())
        merge(hub, step)
        hub.receive("stale", 0, raw(stale))
        part = Part(object="stale", learner="0", base_version=0, weight=1.0)
        finish = hub.begin(Merge(fragment=0, version=2, parts=[part]))
        if retire:
            hub.retire(0, 0)
            for name in "abc":
                hub.receive(name, 0, raw(torch.full((N,), 9.0)))
        results.append(finish())
    assert results[0] == results[1]


def test_fragments_may_merge_in_threads() -> None:
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
    plan = make_plan(describe(model), 4)
    serial, threaded = (HubState(plan, decoupled(num_fragments=4)) for _ in range(2))
    for hub in (serial, threaded):
        _fill(hub, plan)
    actions = [
        Merge(
            fragment=i,
            version=1,
            parts=[Part(object=f"{m}.{i}", learner=str(m), base_version=0, weight=0.5) for m in (0, 1)],
        )
        for i in range(4)
    ]
    with ThreadPoolExecutor(4) as pool:
        begun = [threaded.begin(action) for action in actions]
        merged = [future.result() for future in [pool.submit(merge) for merge in begun]]
    assert merged == [serial.merge(action) for action in actions]


def _fill(hub: HubState, plan: FragmentPlan) -> None:
    gen = torch.Generator().manual_seed(0)
    for i, fragment in enumerate(plan.fragments):
        hub.seed(i, raw(torch.randn(fragment.num_elements, generator=gen)))
        for m in (0, 1):
            hub.receive(f"{m}.{i}", i, raw(torch.randn(fragment.num_elements, generator=gen)))
